"""A person's login: the authorization code flow with PKCE, in a browser that returns to this machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlencode, urlsplit

import anyio
from mcp.client.auth import OAuthFlowError, PKCEParameters
from mcp.client.auth.utils import validate_authorization_response_iss
from mcp.shared.auth import OAuthClientInformationFull

from gateway.mcp_client.auth.credentials import AuthError, Challenge
from gateway.mcp_client.auth.discovery import Authorization, discover
from gateway.mcp_client.auth.loopback import LoopbackReceiver, open_loopback
from gateway.mcp_client.auth.oauth_credentials import PersonCredentials, select_scope, stored_client
from gateway.mcp_client.auth.oauth_http import quote_text
from gateway.mcp_client.auth.token_file import Login, Tokens
from gateway.mcp_client.auth.token_requests import exchange_code, get_client, revoke

ShowUrl = Callable[[str], Awaitable[None]]
"""Shows the person where to log in: opens a browser, or prints the address."""
_REVOKE_S = 10.0


async def log_in(credentials: PersonCredentials, challenge: Challenge, show_url: ShowUrl, timeout_s: float) -> Tokens:
    """Has a person log in, and stores the tokens; raises `AuthError`."""
    login = credentials.file.read()
    config = credentials.config
    authorization = await discover(credentials.http, credentials.server_url, challenge, config.issuer)
    scope = select_scope(config, authorization, challenge, login.missing_scope)
    known = login.client
    async with open_loopback(config.redirect_uri, _registered_port(known)) as receiver:
        client = await get_client(credentials.http, config, authorization, receiver.redirect_uri, known, scope)
        pkce = PKCEParameters.generate()
        url = _authorization_url(authorization, client, receiver, pkce.code_challenge, scope)
        await show_url(url)
        answer = await _wait_for_answer(receiver, timeout_s)
    code = _check_answer(answer, authorization)
    form = {"code": code, "code_verifier": pkce.code_verifier, "redirect_uri": receiver.redirect_uri}
    tokens = await exchange_code(credentials.http, authorization, client, form, scope)
    if config.client_id is not None:  # The configuration has the secret anyway.
        client = client.model_copy(update={"client_secret": None})
    async with credentials.file.lock():
        credentials.file.write(Login(server_url=credentials.server_url, client=client, tokens=tokens))
    return tokens


def _registered_port(client: OAuthClientInformationFull | None) -> int:
    """The port that the gateway registered itself with; authorization servers may insist on it."""
    uris = client.redirect_uris if client is not None else None
    return (urlsplit(str(uris[0])).port or 0) if uris else 0


def _authorization_url(
    authorization: Authorization,
    client: OAuthClientInformationFull,
    receiver: LoopbackReceiver,
    code_challenge: str,
    scope: str | None,
) -> str:
    parameters = {
        "response_type": "code",
        "client_id": client.client_id,
        "redirect_uri": receiver.redirect_uri,
        "state": receiver.state,
        "code_challenge": code_challenge,
        "code_challenge_method": "S256",
        "resource": authorization.resource,
    }
    if scope:
        parameters["scope"] = scope
        if "offline_access" in scope.split():
            parameters["prompt"] = "consent"
    endpoint = str(authorization.metadata.authorization_endpoint)
    return f"{endpoint}{'&' if urlsplit(endpoint).query else '?'}{urlencode(parameters)}"


async def _wait_for_answer(receiver: LoopbackReceiver, timeout_s: float) -> dict[str, str]:
    with anyio.move_on_after(timeout_s):
        return await receiver.wait()
    raise AuthError(f"nobody logged in within {timeout_s:g} s", "run it again, and open the address that it prints")


def _check_answer(answer: dict[str, str], authorization: Authorization) -> str:
    """The code in an answer whose state is right; another issuer's answer is refused, an error as well."""
    try:
        validate_authorization_response_iss(answer.get("iss"), authorization.metadata)
    except OAuthFlowError:
        sender = f"is of {quote_text(answer['iss'])}" if answer.get("iss") else "names no issuer"
        reason = f"the answer to the login {sender}, but it was asked of {authorization.issuer}"
        raise AuthError(reason, "do not log in there; report it to the server's operator") from None
    if (error := answer.get("error")) is not None:
        words = f"{quote_text(error)} ({quote_text(answer.get('error_description', 'no description'))})"
        raise AuthError(f"the authorization server refuses the login: {words}", "log in again, with another account")
    if not answer.get("code"):
        raise AuthError("the answer to the login has no code", "report it to the authorization server's operator")
    return answer["code"]


async def log_out(credentials: PersonCredentials) -> bool:
    """Revokes and forgets the stored login, its client included; whether there was one."""
    try:
        login = credentials.file.read()
        client = stored_client(credentials.config, login)
        if login.tokens is not None and client is not None:
            with anyio.move_on_after(_REVOKE_S):
                await revoke(credentials.http, login.tokens, client)
    except AuthError:
        pass  # An unreadable file is removed as well, and a server that is down keeps nobody logged in here.
    return credentials.file.remove()
