"""Discovery: which authorization server protects an MCP server, and where its endpoints are.

Protected-resource metadata first, then OAuth or OpenID metadata of the issuer that it names; servers of 2025-03-26
without such metadata are their own authorization server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mcp.client.auth import OAuthFlowError
from mcp.client.auth.utils import (
    build_oauth_authorization_server_metadata_discovery_urls,
    build_protected_resource_metadata_discovery_urls,
    issuers_match,
    validate_metadata_issuer,
)
from mcp.shared.auth import OAuthMetadata, ProtectedResourceMetadata
from mcp.shared.auth_utils import check_resource_allowed, resource_url_from_server_url
from pydantic import BaseModel, ValidationError

from gateway.mcp_client.auth.credentials import AuthError, Challenge
from gateway.mcp_client.auth.oauth_http import Answer, OAuthHttp, quote_text

_REPORT = "report it to the server's operator"
_MAX_SERVERS = 16
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Authorization:
    """What protects an MCP server: the resource to name in requests, and the authorization server's metadata."""

    resource: str
    metadata: OAuthMetadata
    scopes: tuple[str, ...] | None = None
    """The scopes that the resource names; None if it names none."""

    @property
    def issuer(self) -> str:
        return str(self.metadata.issuer)

    def supports_auth_method(self, method: str) -> bool:
        methods = self.metadata.token_endpoint_auth_methods_supported
        return methods is not None and method in methods


async def discover(http: OAuthHttp, server_url: str, challenge: Challenge, issuer: str | None) -> Authorization:
    """Finds the authorization server. With `issuer` only that one is accepted; raises `AuthError`."""
    resource = await _get_resource(http, server_url, challenge)
    if resource is None:
        parts = urlsplit(server_url)
        origin = f"{parts.scheme}://{parts.netloc}"
        _check_issuer([origin], issuer)
        own = await _get_metadata(http, None, server_url, origin) or _default_metadata(origin)
        return _checked(http, Authorization(resource_url_from_server_url(server_url), own))
    named = [str(url) for url in resource.authorization_servers][:_MAX_SERVERS]
    chosen = _check_issuer(named, issuer)
    metadata = await _get_metadata(http, http.check_url(chosen, "the authorization server"), server_url, chosen)
    if metadata is None:
        raise AuthError(f"the authorization server {quote_text(chosen)} has no metadata", _REPORT)
    scopes = None if resource.scopes_supported is None else tuple(resource.scopes_supported)
    return _checked(http, Authorization(str(resource.resource), metadata, scopes))


def _check_issuer(named: list[str], issuer: str | None) -> str:
    """The issuer to use, of those that a server names; raises `AuthError` if it is not the expected one."""
    if not named:
        raise AuthError("its protected-resource metadata names no authorization server", _REPORT)
    if issuer is None:
        return named[0]
    for name in named:
        if issuers_match(name, issuer):
            return name
    reason = f"it names the authorization server {quote_text(named[0])}, but its tokens come from {quote_text(issuer)}"
    raise AuthError(reason, "if that is right, name it as `oauth.issuer` of this server")


async def _get_resource(http: OAuthHttp, server_url: str, challenge: Challenge) -> ProtectedResourceMetadata | None:
    is_broken = False
    for url in build_protected_resource_metadata_discovery_urls(challenge.parameter("resource_metadata"), server_url):
        answer = await http.get(url, "its protected-resource metadata")
        resource = _parse(ProtectedResourceMetadata, answer)
        if resource is None:
            is_broken = is_broken or (answer.status == 200 and "resource" in answer.fields)
            continue
        wanted = resource_url_from_server_url(server_url)
        if not check_resource_allowed(requested_resource=wanted, configured_resource=str(resource.resource)):
            reason = f"its protected-resource metadata is for {quote_text(str(resource.resource))}, not for {wanted}"
            raise AuthError(reason, "correct its `url`, or report it to the server's operator")
        return resource
    if is_broken:
        raise AuthError("its protected-resource metadata does not follow RFC 9728", _REPORT)
    return None


async def _get_metadata(http: OAuthHttp, issuer: str | None, server_url: str, expected: str) -> OAuthMetadata | None:
    for url in build_oauth_authorization_server_metadata_discovery_urls(issuer, server_url):
        metadata = _parse(OAuthMetadata, await http.get(url, "the authorization server's metadata"))
        if metadata is None:
            continue
        named = str(metadata.issuer)
        try:
            validate_metadata_issuer(metadata, named if issuers_match(named, expected) else expected)
        except OAuthFlowError:
            reason = f"the metadata of the authorization server {quote_text(expected)} is of {quote_text(named)}"
            raise AuthError(reason, _REPORT) from None
        return metadata
    return None


def _parse(model: type[M], answer: Answer) -> M | None:
    """The document; None if this address has none. A failing server is an error, since it says nothing."""
    if answer.status >= 500 or answer.status == 429:
        host = urlsplit(answer.url).hostname
        raise AuthError(f"{host} answered a request for metadata with HTTP {answer.status}", "try again later")
    if answer.status != 200:
        return None
    try:
        return model.model_validate(answer.document)
    except ValidationError:
        return None


def _default_metadata(origin: str) -> OAuthMetadata:
    """The endpoints of a server from before there was metadata."""
    fields: dict[str, Any] = {"issuer": origin, "response_types_supported": ["code"]}
    paths = {"authorization_endpoint": "authorize", "token_endpoint": "token", "registration_endpoint": "register"}
    return OAuthMetadata.model_validate(fields | {name: f"{origin}/{path}" for name, path in paths.items()})


def _checked(http: OAuthHttp, authorization: Authorization) -> Authorization:
    metadata = authorization.metadata
    for name in ("authorization_endpoint", "token_endpoint", "registration_endpoint", "revocation_endpoint"):
        if (url := getattr(metadata, name, None)) is not None:
            http.check_url(str(url), f"its {name.replace('_', ' ')}")
    methods = metadata.code_challenge_methods_supported
    if methods is not None and "S256" not in methods:
        raise AuthError("its authorization server does not support PKCE with S256", _REPORT)
    return authorization
