"""The credentials of one server: stored tokens of a person's login, or tokens for a job, refreshed when needed.

The SDK's provider (2.3.0) cannot keep what docs/authorization.md promises, so only its models, its rules and its
signing are used here. It holds a lock over each request, answers included: 20 calls of 0.1 s at once take 2.1 s. After
a restart it knows no expiry time and no token endpoint, and sends the refresh token and the client's secret to `/token`
of the MCP server itself, whoever issued them. A rejected token makes it ask a person to log in where a refresh would
do, and two processes spend one refresh token twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mcp.client.auth.utils import issuers_match
from mcp.shared.auth import OAuthClientInformationFull

from gateway.config.models import Server
from gateway.config.server_auth import OAuth
from gateway.mcp_client.auth.auth_command import CommandCredentials
from gateway.mcp_client.auth.credentials import AuthError, Challenge, Credentials
from gateway.mcp_client.auth.discovery import Authorization, discover
from gateway.mcp_client.auth.oauth_http import OAuthHttp, quote_text
from gateway.mcp_client.auth.token_file import Login, TokenFile, Tokens
from gateway.mcp_client.auth.token_requests import RefusedGrant, refresh, request_client_credentials
from gateway.mcp_client.http_client import GetClient

EXPIRY_MARGIN_S = 30.0
"""Tokens are refreshed this long before they expire."""
_NO_LOGIN_REMEDY = ", or set `auth_token`, `headers` or `auth_command` of this server"


def select_scope(config: OAuth, authorization: Authorization, challenge: Challenge, *more: str | None) -> str | None:
    """The scopes to ask for: configured ones, else those of the refusal, else those of the resource; and `more`."""
    asked = challenge.parameter("scope")
    chosen = list(config.scopes or (asked.split() if asked else authorization.scopes or ()))
    if config.scopes and challenge.is_step_up and asked:
        chosen += asked.split()
    chosen = [*(scope for scopes in more if scopes for scope in scopes.split()), *chosen]
    offered = authorization.metadata.scopes_supported or ()
    if chosen and "offline_access" in offered and config.grant == "authorization_code":
        chosen.append("offline_access")
    return join_scopes(chosen)


def join_scopes(scopes: Iterable[str]) -> str | None:
    """The scopes as one text, each once; None if there are none."""
    return " ".join(dict.fromkeys(scopes)) or None


def stored_client(config: OAuth, login: Login) -> OAuthClientInformationFull | None:
    """The client that a login was made as, with its configured secret; None if another client or issuer is configured
    now."""
    client = login.client
    if login.tokens is not None and config.issuer is not None and not issuers_match(login.tokens.issuer, config.issuer):
        return None
    if client is None or config.client_id is None:
        return client
    secret = None if config.client_secret is None else config.client_secret.get_secret_value()
    return client.model_copy(update={"client_secret": secret}) if client.client_id == config.client_id else None


class OAuthCredentials(Credentials):
    """A bearer token. Without one, requests are sent as they are, since a refusal names what protects the server."""

    def __init__(self, name: str, server_url: str, config: OAuth | None, get_client: GetClient) -> None:
        super().__init__()
        self.config = config or OAuth()
        self.http = OAuthHttp(get_client, server_url, self.config.issuer)
        self.server_url = server_url
        self._tokens: Tokens | None = None

    def needs_renewal(self) -> bool:
        return self._tokens is not None and self._tokens.expires_within(EXPIRY_MARGIN_S)

    def has_expired(self) -> bool:
        return self._tokens is not None and self._tokens.expires_within(0)

    def _use(self, tokens: Tokens | None) -> Mapping[str, str]:
        self._tokens = tokens
        return {} if tokens is None else {"Authorization": f"Bearer {tokens.access_token}"}


class JobCredentials(OAuthCredentials):
    """Tokens by client credentials, kept in memory. A missing scope is asked for once."""

    remedy = "see `oauth` of this server"
    _authorization: Authorization | None = None
    _scope: str | None = None

    async def fetch(self, challenge: Challenge | None) -> Mapping[str, str]:
        refused = challenge or Challenge()
        if self._authorization is None or (challenge is not None and challenge.status == 401):
            self._authorization = await discover(self.http, self.server_url, refused, self.config.issuer)
        scope = self._scope
        if challenge is not None:
            held = self._scope if challenge.is_step_up else None
            scope = select_scope(self.config, self._authorization, challenge, held)
            if challenge.is_step_up and set((scope or "").split()) <= set((self._scope or "").split()):
                missing = quote_text(challenge.parameter("scope") or "more scopes")
                raise AuthError(f"the server asks for {missing}, which its tokens were asked for already", self.remedy)
        tokens = await request_client_credentials(self.http, self.config, self._authorization, scope)
        self._scope = scope
        return self._use(tokens)


class PersonCredentials(OAuthCredentials):
    """The tokens of `mtrl-gateway login`, shared with other processes by their file. Nobody is asked to log in here."""

    def __init__(self, name: str, server_url: str, config: OAuth | None, get_client: GetClient) -> None:
        super().__init__(name, server_url, config, get_client)
        self.file = TokenFile(name, server_url)
        self._is_loaded = False
        self.remedy = f"run `mtrl-gateway login {name}`{_NO_LOGIN_REMEDY if config is None else ''}"

    def needs_renewal(self) -> bool:
        return not self._is_loaded or super().needs_renewal()

    async def fetch(self, challenge: Challenge | None) -> Mapping[str, str]:
        self._is_loaded = True
        login = self.file.read()
        if login.tokens is None:
            self._use(None)
            if challenge is None:
                return {}
            raise self._refusal("refuses access without a login", challenge)
        if self._is_news(login.tokens):
            return self._use(login.tokens)
        async with self.file.lock():
            return await self._renew_stored(challenge)

    def _is_news(self, stored: Tokens) -> bool:
        """Whether another process stored other tokens, which are good."""
        known = None if self._tokens is None else self._tokens.access_token
        return stored.access_token != known and not stored.expires_within(EXPIRY_MARGIN_S)

    async def _renew_stored(self, challenge: Challenge | None) -> Mapping[str, str]:
        login = self.file.read()
        tokens = login.tokens
        if tokens is not None and self._is_news(tokens):
            return self._use(tokens)
        if challenge is not None and challenge.is_step_up:
            raise self._missing_scope(login, challenge)
        client = stored_client(self.config, login)
        if tokens is not None and client is None and challenge is not None:
            raise AuthError(
                f"its stored login is of {tokens.issuer} or of another client than `oauth` has", self.remedy
            )
        if tokens is None or tokens.refresh_token is None or client is None:
            # An expired token is not sent; the server's refusal will then say what it wants.
            if challenge is None:
                return self._use(None)
            raise self._refusal("rejects its login", challenge)
        try:
            renewed = await refresh(self.http, tokens, tokens.refresh_token, client)
        except RefusedGrant as error:
            self.file.write(login.model_copy(update={"tokens": None}))
            self._use(None)
            raise AuthError(f"its login is over: {error.reason}", self.remedy) from None
        self.file.write(login.model_copy(update={"tokens": renewed}))
        return self._use(renewed)

    def _missing_scope(self, login: Login, challenge: Challenge) -> AuthError:
        asked = challenge.parameter("scope") or ""
        granted = (login.tokens.scope if login.tokens is not None else None) or ""
        if set(asked.split()) <= set(granted.split()):
            return AuthError(f"the server refuses its token (scope {quote_text(granted)}) as insufficient", self.remedy)
        wanted = join_scopes([*granted.split(), *(login.missing_scope or "").split(), *asked.split()])
        self.file.write(login.model_copy(update={"missing_scope": wanted}))
        return AuthError(f"its login lacks the scope {quote_text(asked)}", self.remedy)

    def _refusal(self, what: str, challenge: Challenge) -> AuthError:
        asks = f" (it asks for: {quote_text(challenge.header)})" if challenge.header else ""
        return AuthError(f"the server {what}: HTTP {challenge.status}{asks}", self.remedy)


def build_credentials(name: str, config: Server, get_client: GetClient) -> Credentials | None:
    """The credentials of a server; None if its headers are fixed, or it is a child process."""
    if config.url is None or config.auth_token is not None:
        return None
    if config.auth_command:
        return CommandCredentials(config.auth_command, config.auth_refresh_s)
    if any(header.lower() == "authorization" for header in config.headers):
        return None
    if config.oauth is not None and config.oauth.grant == "client_credentials":
        return JobCredentials(name, config.url, config.oauth, get_client)
    return PersonCredentials(name, config.url, config.oauth, get_client)


class NoCredentials(Credentials):
    """Sends requests as they are, and keeps what a refusal asks for: the first step of a login."""

    def __init__(self) -> None:
        super().__init__()
        self.challenge: Challenge | None = None

    def needs_renewal(self) -> bool:
        return False

    async def fetch(self, challenge: Challenge | None) -> Mapping[str, str]:
        self.challenge = challenge or self.challenge
        raise AuthError("it asks for a login")
