"""Requests for tokens (by code, refresh token, secret or signed JWT), and registration of the gateway as a client."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from mcp.client.auth.extensions.client_credentials import SignedJWTParameters
from mcp.client.auth.utils import create_client_info_from_metadata_url, should_use_client_metadata_url
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import ValidationError

from gateway.config.server_auth import OAuth
from gateway.mcp_client.auth.credentials import AuthError, check_header
from gateway.mcp_client.auth.discovery import Authorization
from gateway.mcp_client.auth.oauth_http import Answer, OAuthHttp
from gateway.mcp_client.auth.token_file import Tokens

_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_MAX_EXPIRY_S = 10 * 365 * 86400
_EC_ALGORITHMS = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_ENDPOINT = "the token endpoint"
_BASIC, _POST = "client_secret_basic", "client_secret_post"


class RefusedGrant(AuthError):
    """The authorization server refuses a code or a refresh token for good."""


async def get_client(
    http: OAuthHttp,
    config: OAuth,
    authorization: Authorization,
    redirect_uri: str,
    known: OAuthClientInformationFull | None,
    scope: str | None,
) -> OAuthClientInformationFull:
    """The client to log in as: registered by hand, by a metadata document, earlier, or now."""
    if (client := configured_client(config, authorization)) is not None:
        return client
    document = config.client_metadata_url
    if document is not None and should_use_client_metadata_url(authorization.metadata, document):
        return create_client_info_from_metadata_url(document)
    registered = [str(uri) for uri in (known and known.redirect_uris) or ()]
    if known is not None and known.issuer == authorization.issuer and registered == [redirect_uri]:
        return known
    return await _register(http, authorization, redirect_uri, scope)


def configured_client(config: OAuth, authorization: Authorization) -> OAuthClientInformationFull | None:
    """The client that the configuration names, if it names one."""
    if config.client_id is None:
        return None
    secret = None if config.client_secret is None else config.client_secret.get_secret_value()
    method = _secret_method(authorization) if secret is not None else "none"
    return OAuthClientInformationFull(
        client_id=config.client_id, client_secret=secret, token_endpoint_auth_method=method, issuer=authorization.issuer
    )


def _secret_method(authorization: Authorization) -> str:
    only_post = authorization.supports_auth_method(_POST) and not authorization.supports_auth_method(_BASIC)
    return _POST if only_post else _BASIC


async def _register(
    http: OAuthHttp, authorization: Authorization, redirect_uri: str, scope: str | None
) -> OAuthClientInformationFull:
    endpoint = authorization.metadata.registration_endpoint
    if endpoint is None:
        reason = f"the authorization server {authorization.issuer} does not register clients by itself"
        raise AuthError(reason, "register mtrl-gateway there, and set `oauth.client_id` (and `client_secret`)")
    methods = authorization.metadata.token_endpoint_auth_methods_supported
    method = "none" if methods is None or "none" in methods else _secret_method(authorization)
    document: dict[str, Any] = {
        "client_name": "mtrl-gateway",
        "redirect_uris": [redirect_uri],
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "token_endpoint_auth_method": method,
        "application_type": "native",
    }
    answer = await http.post_json(str(endpoint), document | ({"scope": scope} if scope else {}), "registration")
    if answer.status not in (200, 201):
        reason = f"the authorization server refuses to register mtrl-gateway ({answer.describe_error()})"
        raise AuthError(reason, "register it by hand, and set `oauth.client_id`")
    return _parse_registration(answer, authorization, redirect_uri)


def _parse_registration(answer: Answer, authorization: Authorization, redirect_uri: str) -> OAuthClientInformationFull:
    problem = "the answer to our registration is not a client"
    fields = {key: value for key, value in answer.fields.items() if key not in ("issuer", "redirect_uris")}
    try:
        client = OAuthClientInformationFull.model_validate(fields | {"redirect_uris": [redirect_uri]})
    except ValidationError:
        raise AuthError(problem, "register it by hand, and set `oauth.client_id`") from None
    method = client.token_endpoint_auth_method
    if method is None:
        method = "none" if client.client_secret is None else _secret_method(authorization)
    if method not in ("none", _BASIC, _POST) or (method != "none" and client.client_secret is None):
        problem = f"the authorization server registered mtrl-gateway with {method!r}, which it cannot use"
        raise AuthError(problem, "register it by hand, and set `oauth.client_id`")
    return client.model_copy(update={"issuer": authorization.issuer, "token_endpoint_auth_method": method})


async def exchange_code(
    http: OAuthHttp,
    authorization: Authorization,
    client: OAuthClientInformationFull,
    form: dict[str, str],
    scope: str | None,
) -> Tokens:
    """Tokens for an authorization code; `form` has the code, its verifier and the redirect URI."""
    full = {"grant_type": "authorization_code", **form, "resource": authorization.resource}
    answer = await _post(http, str(authorization.metadata.token_endpoint), client, full)
    return _parse_tokens(answer, authorization, scope, [*full.values(), client.client_secret])


async def refresh(http: OAuthHttp, tokens: Tokens, refresh_token: str, client: OAuthClientInformationFull) -> Tokens:
    """New tokens for a refresh token, from the endpoint that issued it; raises `RefusedGrant` if it is over."""
    form = {"grant_type": "refresh_token", "refresh_token": refresh_token, "resource": tokens.resource}
    answer = await _post(http, tokens.token_endpoint, client, form)
    token = _parse_token(answer, [*form.values(), client.client_secret])
    update = {
        "access_token": token.access_token,
        "refresh_token": token.refresh_token or refresh_token,
        "expires_at": _expiry(token),
        "scope": token.scope or tokens.scope,
    }
    return tokens.model_copy(update=update)


async def request_client_credentials(
    http: OAuthHttp, config: OAuth, authorization: Authorization, scope: str | None
) -> Tokens:
    """Tokens for a job, by the secret or the private key of the configured client."""
    form = {"grant_type": "client_credentials", "resource": authorization.resource}
    if scope:
        form["scope"] = scope
    endpoint = str(authorization.metadata.token_endpoint)
    client = configured_client(config, authorization)
    if client is not None and client.client_secret is not None:
        answer = await _post(http, endpoint, client, form)
        return _parse_tokens(answer, authorization, scope, [client.client_secret])
    form |= {"client_assertion": await _sign(config, authorization), "client_assertion_type": _ASSERTION_TYPE}
    answer = await http.post_form(endpoint, form, {}, _ENDPOINT)
    return _parse_tokens(answer, authorization, scope, form.values())


async def revoke(http: OAuthHttp, tokens: Tokens, client: OAuthClientInformationFull) -> None:
    """Tells the authorization server that the tokens are not used any more."""
    if tokens.revocation_endpoint is not None:
        form = {"token": tokens.refresh_token or tokens.access_token}
        await _post(http, tokens.revocation_endpoint, client, form)


async def _post(http: OAuthHttp, endpoint: str, client: OAuthClientInformationFull, form: dict[str, str]) -> Answer:
    """Posts a form as a client, with its secret if it has one."""
    headers, secret = {}, client.client_secret or ""
    if client.token_endpoint_auth_method == _BASIC:
        pair = f"{quote(client.client_id, safe='')}:{quote(secret, safe='')}"
        headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    else:
        form = {**form, "client_id": client.client_id}
        if client.token_endpoint_auth_method == _POST:
            form["client_secret"] = secret
    return await http.post_form(endpoint, form, headers, _ENDPOINT)


async def _sign(config: OAuth, authorization: Authorization) -> str:
    """A JWT that proves who the client is, for this authorization server only."""
    pem, client_id = _read_key(config), config.client_id or ""
    parameters = SignedJWTParameters(
        issuer=client_id, subject=client_id, signing_key=pem, signing_algorithm=_algorithm(pem)
    )
    return await parameters.create_assertion_provider()(authorization.issuer)


def _read_key(config: OAuth) -> str:
    if config.private_key is not None:
        return config.private_key.get_secret_value()
    path = config.private_key_file or Path()
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"the private key {path} cannot be read ({type(error).__name__})"
        raise AuthError(reason, "correct `oauth.private_key_file`") from None


def _algorithm(pem: str) -> str:
    """The signing algorithm of a private key."""
    remedy = "give an RSA, EC or Ed25519 key without a password, as PEM"
    try:
        key = load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise AuthError("the private key of `oauth` cannot be used", remedy) from None
    if isinstance(key, rsa.RSAPrivateKey):
        return "RS256"
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return "EdDSA"
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _EC_ALGORITHMS:
        return _EC_ALGORITHMS[key.curve.name]
    raise AuthError("the private key of `oauth` has a kind that cannot sign a JWT", remedy)


def _parse_tokens(
    answer: Answer, authorization: Authorization, scope: str | None, secrets: Iterable[str | None]
) -> Tokens:
    token, metadata = _parse_token(answer, secrets), authorization.metadata
    return Tokens(
        access_token=token.access_token,
        refresh_token=token.refresh_token,
        expires_at=_expiry(token),
        scope=scope if token.scope is None else token.scope,
        issuer=authorization.issuer,
        token_endpoint=str(metadata.token_endpoint),
        revocation_endpoint=None if metadata.revocation_endpoint is None else str(metadata.revocation_endpoint),
        resource=authorization.resource,
    )


def _parse_token(answer: Answer, secrets: Iterable[str | None]) -> OAuthToken:
    if answer.status not in (200, 201):
        reason = f"the authorization server gives no token ({answer.describe_error(list(secrets))})"
        kind = RefusedGrant if 400 <= answer.status < 500 and answer.status != 429 else AuthError
        raise kind(reason, "see what its error says; correct `oauth`, or log in again")
    try:
        token = OAuthToken.model_validate(answer.document)
        check_header("Authorization", f"Bearer {token.access_token}")
    except ValueError:
        reason = f"the token endpoint answered with HTTP {answer.status}, but without a bearer token"
        raise AuthError(reason, "report it to the authorization server's operator") from None
    return token


def _expiry(token: OAuthToken) -> float | None:
    if token.expires_in is None:
        return None
    return time.time() + min(max(token.expires_in, 0), _MAX_EXPIRY_S)
