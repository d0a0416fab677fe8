"""An authorization server for tests, and an MCP server that it protects, each at an origin of its own.

It checks what it is sent as a strict server would, and misbehaves on request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlencode

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tests.servers.serve_app import serve_app
from tests.waiting import PATIENCE_S

Misbehave = Callable[[Request], Response | Awaitable[Response] | None]


async def misbehave_at(misbehave: Mapping[str, Misbehave], request: Request) -> Response | None:
    """The answer that a test wants in place of the right one, if any."""
    answer = misbehave.get(request.url.path, lambda request: None)(request)
    return answer if isinstance(answer, Response | None) else await answer


@dataclass
class AuthorizationServer:
    """Clients, codes and tokens. Fields may be changed by tests between requests."""

    url: str = ""
    issuer: str | None = None
    """The issuer in the metadata; by default, its own address."""
    answer_issuer: str | None = None
    """The issuer in answers to logins; by default, that of the metadata."""
    registers: bool = True
    auth_methods: tuple[str, ...] = ("none", "client_secret_basic", "client_secret_post")
    expires_in: int | None = 3600
    clients: dict[str, str | None] = field(default_factory=dict)
    """Client ids, each with its secret."""
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """Access tokens that are good, each with its scopes."""
    refresh_tokens: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """The path and the parameters of every request."""
    misbehave: dict[str, Misbehave] = field(default_factory=dict)
    """By path, a function that may answer in place of this server."""
    check_assertion: Callable[[str], str | None] = lambda assertion: None
    """The client that a signed assertion proves."""
    count: int = 0

    def routes(self) -> list[Route]:
        handlers = {
            "/.well-known/oauth-authorization-server": self._metadata,
            "/.well-known/openid-configuration": self._metadata,
            "/register": self._register,
            "/authorize": self._authorize,
            "/token": self._token,
            "/revoke": self._revoke,
        }
        return [Route(path, self._wrap(handler), methods=["GET", "POST"]) for path, handler in handlers.items()]

    def paths(self, path: str) -> list[dict[str, str]]:
        """The parameters of all requests to a path."""
        return [parameters for requested, parameters in self.requests if requested == path]

    async def answer(self, request: Request) -> Response:
        """The answer to a request, at whatever origin it arrived."""
        handlers = {"/register": self._register, "/authorize": self._authorize, "/token": self._token}
        answer: Response = await self._wrap(handlers[request.url.path])(request)
        return answer

    def _wrap(self, handler: Callable[[Request, dict[str, str]], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            parameters = {key: str(value) for key, value in request.query_params.items()}
            if request.method == "POST" and request.headers["content-type"] == "application/json":
                parameters = {key: json.dumps(value) for key, value in (await request.json()).items()}
            elif request.method == "POST":
                parameters |= {key: str(value) for key, value in (await request.form()).items()}
            self.requests.append((request.url.path, parameters))
            answer = await misbehave_at(self.misbehave, request)
            return handler(request, parameters) if answer is None else answer

        return endpoint

    def _metadata(self, request: Request, parameters: dict[str, str]) -> Response:
        fields: dict[str, Any] = {
            "issuer": self.issuer or self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "revocation_endpoint": f"{self.url}/revoke",
            "response_types_supported": ["code"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": list(self.auth_methods),
            "authorization_response_iss_parameter_supported": True,
        }
        if self.registers:
            fields["registration_endpoint"] = f"{self.url}/register"
        return JSONResponse(fields)

    def _new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}-{self.count}"

    def _register(self, request: Request, parameters: dict[str, str]) -> Response:
        method = json.loads(parameters["token_endpoint_auth_method"])
        client_id = self._new("client")
        secret = None if method == "none" else self._new("client-secret")
        self.clients[client_id] = secret
        fields = {"client_id": client_id, "token_endpoint_auth_method": method}
        return JSONResponse(fields | ({} if secret is None else {"client_secret": secret}), 201)

    def _authorize(self, request: Request, parameters: dict[str, str]) -> Response:
        answer = {"state": parameters["state"], "iss": self.answer_issuer or self.issuer or self.url}
        if parameters["client_id"] not in self.clients or parameters["code_challenge_method"] != "S256":
            return JSONResponse({"error": "invalid_request"}, 400)
        code = self._new("code")
        self.codes[code] = parameters
        answer["code"] = code
        return RedirectResponse(f"{parameters['redirect_uri']}?{urlencode(answer)}", 302)

    def _token(self, request: Request, parameters: dict[str, str]) -> Response:
        client_id = self._authenticate(request, parameters)
        if client_id is None:
            return JSONResponse({"error": "invalid_client", "error_description": "unknown client"}, 401)
        scope: str | None
        match parameters["grant_type"]:
            case "authorization_code":
                asked = self.codes.pop(parameters["code"], {})
                digest = hashlib.sha256(parameters["code_verifier"].encode()).digest()
                challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
                same = all(asked.get(key) == parameters[key] for key in ("redirect_uri", "resource"))
                if asked.get("code_challenge") != challenge or asked.get("client_id") != client_id or not same:
                    return JSONResponse({"error": "invalid_grant"}, 400)
                scope = asked.get("scope", "")
            case "refresh_token":
                scope = self.refresh_tokens.pop(parameters["refresh_token"], None)
                if scope is None:
                    return JSONResponse({"error": "invalid_grant", "error_description": "used before"}, 400)
            case _:
                scope = parameters.get("scope", "")
        return self._issue(scope)

    def _issue(self, scope: str) -> Response:
        access, refresh = self._new("access"), self._new("refresh")
        self.tokens[access], self.refresh_tokens[refresh] = scope, scope
        fields: dict[str, Any] = {"access_token": access, "token_type": "bearer", "refresh_token": refresh}
        if self.expires_in is not None:
            fields["expires_in"] = self.expires_in
        return JSONResponse(fields | {"scope": scope})

    def _authenticate(self, request: Request, parameters: Mapping[str, str]) -> str | None:
        """The client that a request is from, if its credentials are right."""
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        if scheme == "Basic":
            client_id, secret = (unquote(part) for part in base64.b64decode(encoded).decode().split(":"))
        elif "client_assertion" in parameters:
            return self.check_assertion(parameters["client_assertion"])
        else:
            client_id, secret = parameters["client_id"], parameters.get("client_secret", "")
        known = client_id in self.clients and (self.clients[client_id] or "") == secret
        return client_id if known else None

    def _revoke(self, request: Request, parameters: dict[str, str]) -> Response:
        self.refresh_tokens.pop(parameters["token"], None)
        return Response()


@dataclass
class ProtectedServer:
    """An MCP server with the tools `read` and `write`, which need scopes of those names."""

    authorization: AuthorizationServer
    url: str = ""
    resource: str | None = None
    """The resource in its metadata; by default, its own address."""
    authorization_servers: list[str] | None = None
    names_metadata: bool = True
    is_its_own_authorization_server: bool = False
    """Has the endpoints of an authorization server at its own origin, but no metadata of one."""
    redirect_to: str | None = None
    tokens_seen: list[str] = field(default_factory=list)
    misbehave: dict[str, Misbehave] = field(default_factory=dict)

    def routes(self) -> list[Route]:
        metadata = "/.well-known/oauth-protected-resource/mcp"
        return [
            Route("/mcp", self._mcp, methods=["GET", "POST", "DELETE"]),
            Route(metadata, self._metadata, methods=["GET"]),
            *(Route(path, self._authorize, methods=["GET", "POST"]) for path in ("/authorize", "/token", "/register")),
        ]

    async def _authorize(self, request: Request) -> Response:
        if not self.is_its_own_authorization_server:
            return Response(status_code=404)
        self.authorization.answer_issuer = self.url.removesuffix("/mcp")
        answer: Response = await self.authorization.answer(request)
        return answer

    async def _metadata(self, request: Request) -> Response:
        if not self.names_metadata:
            return Response(status_code=404)
        answer = await misbehave_at(self.misbehave, request)
        servers = self.authorization_servers or [self.authorization.url]
        return answer or JSONResponse({"resource": self.resource or self.url, "authorization_servers": servers})

    async def _mcp(self, request: Request) -> Response:
        if self.redirect_to is not None:
            return RedirectResponse(self.redirect_to, 307)
        if request.method != "POST":
            return Response(status_code=405)
        message = await request.json()
        method, params = message["method"], message.get("params", {})
        if method == "server/discover":
            return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no"}})
        if (refusal := self._refuse(request, method, params)) is not None:
            return refusal
        if "id" not in message:
            return Response(status_code=202)
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": _answer(method, params)})

    def _refuse(self, request: Request, method: str, params: Mapping[str, Any]) -> Response | None:
        """The refusal of a request whose token is not good enough."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.tokens_seen.append(token)
        needed = params["name"] if method == "tools/call" else "read"
        metadata = self.url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp")
        challenge = f'Bearer resource_metadata="{metadata}", scope="{needed}"'
        granted = self.authorization.tokens.get(token)
        if granted is None:
            return Response(status_code=401, headers={"www-authenticate": f'{challenge}, error="invalid_token"'})
        if needed not in granted.split():
            return Response(status_code=403, headers={"www-authenticate": f'{challenge}, error="insufficient_scope"'})
        return None


def _answer(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}}
    match method:
        case "initialize":
            info = {"name": "protected", "version": "1"}
            return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            tools = [{"name": name, "description": name, "inputSchema": schema} for name in ("read", "write")]
            return {"tools": tools}
    return {"content": [{"type": "text", "text": f"{params.get('name')} done"}]}


@asynccontextmanager
async def serve_protected() -> AsyncIterator[ProtectedServer]:
    """Both servers, listening."""
    authorization = AuthorizationServer()
    server = ProtectedServer(authorization)
    both = _serve_both(authorization, server)
    await to_thread.run_sync(both.__enter__)
    try:
        yield server
    finally:
        await to_thread.run_sync(both.__exit__, None, None, None)


@contextmanager
def _serve_both(authorization: AuthorizationServer, server: ProtectedServer) -> Iterator[None]:
    with serve_app(*authorization.routes()) as url, serve_app(*server.routes()) as origin:
        authorization.url, server.url = url, f"{origin}/mcp"
        yield


def follow_redirects(url: str) -> bool:
    """A browser, for an authorization server that asks the person nothing."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as page:
        page.read()
    return True


def html_page(request: Request) -> Response:
    return HTMLResponse("<html><body>Please sign in</body></html>")


def huge_answer(request: Request) -> Response:
    return Response(b'{"issuer": "' + b"x" * 2_000_000 + b'"}', media_type="application/json")


async def silence(request: Request) -> Response:
    """No answer, until the client gives up."""
    while not await request.is_disconnected():  # noqa: ASYNC110 (it has no event)
        await anyio.sleep(0.02)
    return Response()
