"""Authorization servers that hang, lie, or lead elsewhere: each login ends typed and in time, and no secret leaves."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from gateway.config.models import Server
from gateway.errors import GatewayError
from gateway.mcp_client.auth import oauth_http
from gateway.mcp_client.auth.credentials import AuthError
from gateway.mcp_client.auth.oauth_http import OAuthHttp
from gateway.mcp_client.http_client import HttpClients
from gateway.types import Outcome
from tests.mcp_client.auth.authorization_server import (
    Misbehave,
    ProtectedServer,
    html_page,
    huge_answer,
    serve_protected,
    silence,
)
from tests.mcp_client.auth.protected_user import user_of_protected_server

METADATA, RESOURCE = "/.well-known/oauth-authorization-server", "/.well-known/oauth-protected-resource/mcp"
OPENID = "/.well-known/openid-configuration"
OAUTH = {"client_id": "ours", "client_secret": "hunter2-secret"}
Change = Callable[[ProtectedServer], object]


def authorization_answers(path: str, misbehave: Misbehave) -> Change:
    paths = (METADATA, OPENID) if path == METADATA else (path,)
    return lambda server: server.authorization.misbehave.update(dict.fromkeys(paths, misbehave))


def resource_answers(misbehave: Misbehave) -> Change:
    return lambda server: server.misbehave.update({RESOURCE: misbehave})


def status(code: int) -> Misbehave:
    return lambda request: Response(status_code=code)


def echo_secrets(request: Request) -> Response:
    """An error that repeats whatever the gateway sent, as a careless or hostile server may."""
    words = f"bad {OAUTH['client_secret']} {request.headers.get('authorization')}\x1b[2J" + "x" * 5000
    return JSONResponse({"error": "invalid_request", "error_description": words}, 400)


def changed(**fields: object) -> Change:
    return lambda server: [setattr(server.authorization, name, value) for name, value in fields.items()]


CASES: dict[str, tuple[Change, str]] = {
    "metadata never answers": (authorization_answers(METADATA, silence), "did not answer within 1 s"),
    "metadata is huge": (authorization_answers(METADATA, huge_answer), "more than 262144 bytes"),
    "metadata is HTML": (authorization_answers(METADATA, html_page), "has no metadata"),
    "metadata fails": (authorization_answers(METADATA, status(503)), "HTTP 503"),
    "metadata is of another issuer": (changed(issuer="https://attacker.example"), "is of https://attacker.example"),
    "the answer is of another issuer": (changed(answer_issuer="https://attacker.example"), "it was asked of"),
    "the resource's metadata fails": (resource_answers(status(500)), "HTTP 500"),
    "the resource's metadata is of another server": (
        lambda server: setattr(server, "resource", "https://bank.example/mcp"),
        "is for https://bank.example/mcp",
    ),
    "the authorization server is plain HTTP elsewhere": (
        lambda server: setattr(server, "authorization_servers", ["http://169.254.169.254/latest"]),
        "it is not https",
    ),
    "the authorization server is at a link-local address": (
        lambda server: setattr(server, "authorization_servers", ["https://169.254.169.254"]),
        "is at a link-local address, where its server is not",
    ),
    "the authorization server is at a private address": (
        lambda server: setattr(server, "authorization_servers", ["https://[::ffff:10.0.0.1]"]),
        "is at a private address, where its server is not",
    ),
    "the authorization server is no web address": (
        lambda server: setattr(server, "authorization_servers", ["file:///etc/passwd"]),
        "does not follow RFC 9728",
    ),
    "the token endpoint is HTML": (authorization_answers("/token", html_page), "without a bearer token"),
    "the token endpoint fails": (authorization_answers("/token", status(500)), "HTTP 500"),
    "the token cannot be a header": (
        authorization_answers("/token", lambda request: JSONResponse({"access_token": "a\nb", "token_type": "Bearer"})),
        "without a bearer token",
    ),
    "the token is no bearer token": (
        authorization_answers("/token", lambda request: JSONResponse({"access_token": "a", "token_type": "mac"})),
        "without a bearer token",
    ),
    "the error repeats our secret": (authorization_answers("/token", echo_secrets), "invalid_request"),
}


@pytest.mark.parametrize("case", CASES)
async def test_login_at_a_hostile_server_ends_typed_and_quotes_no_secret(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = CASES[case]
    if "never answers" in case:
        monkeypatch.setattr(oauth_http, "REQUEST_S", 1.0)
    names_another = "the authorization server is" in case
    async with user_of_protected_server(tmp_path, **({} if names_another else {"oauth": OAUTH})) as user:
        user.authorization.clients["ours"] = OAUTH["client_secret"]
        change(user.server)
        with anyio.fail_after(60), pytest.raises(GatewayError, match=expected) as failure:
            await user.log_in()
        text = str(failure.value)
        assert "hunter2" not in text and "\x1b" not in text and len(text) < 1000
        assert (await user.call())[0] is Outcome.UNAVAILABLE


@pytest.mark.parametrize("path", [METADATA, "/token", "/register"])
async def test_redirects_to_another_origin_are_not_followed(path: str, tmp_path: Path) -> None:
    async with serve_protected() as attacker, user_of_protected_server(tmp_path) as user:
        target = f"{attacker.authorization.url}{path}"
        authorization_answers(path, lambda request: RedirectResponse(target, 307))(user.server)
        with pytest.raises(GatewayError):
            await user.log_in()
        assert attacker.authorization.requests == []


async def test_server_that_redirects_elsewhere_never_passes_our_token_on(tmp_path: Path) -> None:
    async with serve_protected() as attacker, user_of_protected_server(tmp_path) as user:
        await user.log_in()
        user.server.redirect_to = attacker.url
        assert (await user.call())[0] is Outcome.UNAVAILABLE
        assert attacker.tokens_seen == []


@pytest.mark.parametrize("grant", ["authorization_code", "client_credentials"])
async def test_secret_goes_to_no_authorization_server_but_its_issuer(grant: str, tmp_path: Path) -> None:
    async with (
        serve_protected() as attacker,
        user_of_protected_server(tmp_path, oauth=OAUTH | {"grant": grant}) as user,
    ):
        user.authorization.clients["ours"] = OAUTH["client_secret"]
        user.server.authorization_servers = [attacker.authorization.url]
        _, reason = await user.call()
        assert grant == "authorization_code" or "but its tokens come from" in reason
        with pytest.raises(GatewayError, match=r"but its tokens come from[^§]*oauth\.issuer|nobody logs in"):
            await user.log_in()
        assert attacker.authorization.requests == []


async def test_stored_login_gets_no_secret_once_another_issuer_is_configured(tmp_path: Path) -> None:
    async with serve_protected() as other, user_of_protected_server(tmp_path, oauth=OAUTH) as user:
        user.authorization.clients["ours"] = OAUTH["client_secret"]
        await user.log_in()
        user.configure(oauth=OAUTH | {"issuer": other.authorization.url})
        user.authorization.tokens.clear()
        user.authorization.requests.clear()
        assert "its stored login is of" in (await user.call())[1]
        await user.log_out()
        assert not user.authorization.paths("/token") and not user.authorization.paths("/revoke")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
async def test_server_of_the_internet_leads_to_no_address_of_this_machine(host: str) -> None:
    async with aclosing(HttpClients()) as clients:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            http = OAuthHttp(
                clients.for_server(Server(url="https://93.184.215.14/mcp")), "https://93.184.215.14/mcp", None
            )
            with pytest.raises(AuthError, match="loopback address"):
                await http.get(f"https://{host}:{listener.getsockname()[1]}/metadata", "its metadata")
            with pytest.raises(BlockingIOError):
                listener.accept()


async def test_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    async def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        looked_up.append(host)
        address = "127.0.0.1" if len(looked_up) < 3 else "10.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(anyio, "getaddrinfo", look_up)
    async with serve_protected() as server, aclosing(HttpClients()) as clients:
        port = server.authorization.url.rpartition(":")[2]
        http = OAuthHttp(clients.for_server(Server(url="http://127.0.0.1/mcp")), "http://127.0.0.1/mcp", None)
        http._plain_hosts.add("rebinding.example")
        answer = await http.get(f"http://rebinding.example:{port}{METADATA}", "its metadata")
        assert answer.status == 200 and looked_up == ["rebinding.example", "127.0.0.1"]


async def test_registered_client_is_not_reused_at_another_authorization_server(tmp_path: Path) -> None:
    async with serve_protected() as other, user_of_protected_server(tmp_path) as user:
        await user.log_in()
        user.server.authorization_servers = [other.authorization.url]
        user.server.authorization.tokens = other.authorization.tokens
        await user.log_in()
        assert len(other.authorization.paths("/register")) == 1
        assert other.authorization.paths("/authorize")[0]["client_id"] in other.authorization.clients


async def test_refresh_that_hangs_costs_its_own_calls_only_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        user.authorization.tokens.clear()
        user.authorization.misbehave["/token"] = silence
        with monkeypatch.context() as patched:
            patched.setattr(oauth_http, "REQUEST_S", 1.0)
            outcome, reason = await user.call()
        assert outcome is Outcome.UNAVAILABLE and "did not answer within 1 s" in reason
        del user.authorization.misbehave["/token"]
        assert await user.call() == (Outcome.OK, ""), "a server that was slow does not end the login"
