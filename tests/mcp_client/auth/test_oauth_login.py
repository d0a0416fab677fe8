"""A person's OAuth login: discovery, registration, the browser, the token file, refreshing and logging out."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.errors import GatewayError
from gateway.login import find_server, login_server
from gateway.mcp_client.auth.token_file import state_folder
from gateway.types import Outcome
from tests.mcp_client.auth.authorization_server import follow_redirects, serve_protected
from tests.mcp_client.auth.protected_user import login_files, mode, user_of_protected_server
from tests.mcp_client.mcp_toolsets import call_tool
from tests.servers.start_server import free_port
from tests.waiting import PATIENCE_S, wait_until


async def test_login_registers_the_gateway_and_every_later_run_uses_its_tokens(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        assert any("vault offers 2 tools" in line for line in user.lines)
        assert await user.call() == (Outcome.OK, "")
        (file,) = login_files()
        assert mode(file) == 0o600 and mode(state_folder()) == 0o700
        (registration,) = user.authorization.paths("/register")
        assert json.loads(registration["client_name"]) == "mtrl-gateway"
        (asked,) = user.authorization.paths("/authorize")
        assert asked["resource"] == user.server.url and asked["scope"] == "read"
        assert not any("access-" in line or "refresh-" in line for line in user.lines)


async def test_tokens_are_in_no_log_and_no_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        async with user.toolset() as toolset:
            await call_tool(toolset, "read")
            result = await call_tool(toolset, "write")
            shown = f"{toolset.status} {toolset.config!r} {toolset.credentials!r} {result} {caplog.text} {user.lines}"
        secrets = [*user.authorization.tokens, *user.authorization.refresh_tokens]
        assert len(secrets) == 2 and not [secret for secret in secrets if secret in shown]


async def test_server_from_before_metadata_is_its_own_authorization_server(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        user.server.names_metadata = False
        user.server.is_its_own_authorization_server = True
        await user.log_in()
        assert user.authorization.paths("/authorize")[0]["resource"] == user.server.url
        assert await user.call() == (Outcome.OK, "")


async def test_login_heals_a_gateway_that_is_running(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user, user.toolset() as toolset:
        assert toolset.status.state == "down"
        await user.log_in()
        await wait_until(lambda: toolset.status.state == "up", 30)
        assert (await call_tool(toolset, "read")).outcome is Outcome.OK


async def test_expiring_token_is_refreshed_before_it_is_sent(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        user.authorization.expires_in = 5
        await user.log_in()
        user.authorization.tokens.clear()
        user.authorization.expires_in = 3600
        assert await user.call() == (Outcome.OK, "")
        assert user.server.tokens_seen[-1] in user.authorization.tokens


async def test_rejected_token_is_refreshed_and_the_call_sent_again(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        async with user.toolset() as toolset:
            user.authorization.tokens.clear()
            results = []
            async with anyio.create_task_group() as tasks:

                async def call() -> None:
                    results.append((await call_tool(toolset, "read")).outcome)

                for _ in range(8):
                    tasks.start_soon(call)
            assert results == [Outcome.OK] * 8
        refreshes = [form for form in user.authorization.paths("/token") if form["grant_type"] == "refresh_token"]
        assert len(refreshes) == 1, "calls that are rejected together cause one renewal"


async def test_two_gateways_spend_a_refresh_token_once(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        async with user.toolset() as first, user.toolset() as second:
            user.authorization.tokens.clear()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call_tool, first, "read")
                tasks.start_soon(call_tool, second, "read")
            assert (await call_tool(first, "read")).outcome is Outcome.OK
            assert (await call_tool(second, "read")).outcome is Outcome.OK
        refreshes = [form for form in user.authorization.paths("/token") if form["grant_type"] == "refresh_token"]
        assert len(refreshes) == 1


async def test_refresh_token_that_is_over_asks_for_a_login_and_forgets_it(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        user.authorization.tokens.clear()
        user.authorization.refresh_tokens.clear()
        outcome, reason = await user.call()
        assert outcome is Outcome.UNAVAILABLE
        assert "invalid_grant (used before)" in reason and "mtrl-gateway login vault" in reason
        assert "tokens" not in user.stored()
        await user.log_in()
        assert await user.call() == (Outcome.OK, "")


async def test_missing_scope_is_named_and_the_next_login_asks_for_it_too(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        outcome, reason = await user.call("write")
        assert outcome is Outcome.UNAVAILABLE
        assert "lacks the scope write" in reason and "mtrl-gateway login vault" in reason
        await user.log_in()
        assert user.authorization.paths("/authorize")[-1]["scope"].split() == ["read", "write"]
        assert await user.call("write") == (Outcome.OK, "")


@pytest.mark.parametrize("method", ["client_secret_basic", "client_secret_post"])
async def test_registered_client_with_a_secret_logs_in_by_the_method_the_server_knows(
    method: str, tmp_path: Path
) -> None:
    oauth = {"client_id": "ours", "client_secret": "top: secret+"}
    async with user_of_protected_server(tmp_path, oauth=oauth) as user:
        user.authorization.clients["ours"] = "top: secret+"
        user.authorization.registers = False
        user.authorization.auth_methods = (method,)
        await user.log_in()
        assert await user.call() == (Outcome.OK, "")
        assert ("client_secret" in user.authorization.paths("/token")[0]) == (method == "client_secret_post")
        assert "top: secret" not in json.dumps(user.stored())
        user.authorization.tokens.clear()
        assert await user.call() == (Outcome.OK, ""), "the secret is in the file of servers, not in that of tokens"


async def test_login_that_cannot_be_ends_with_the_reason(tmp_path: Path) -> None:
    def refuse(request: Request) -> RedirectResponse:
        asked, issuer = request.query_params, user.authorization.url
        return RedirectResponse(f"{asked['redirect_uri']}?error=access_denied&state={asked['state']}&iss={issuer}")

    async with user_of_protected_server(tmp_path) as user:
        with pytest.raises(GatewayError, match=r"nobody logged in within 0\.1 s"):
            await login_server(find_server("vault", user.file), print, open_browser=None, timeout_s=0.1)
        user.authorization.misbehave["/authorize"] = refuse
        with pytest.raises(GatewayError, match="access_denied"):
            await user.log_in()
        user.configure(auth_token="fixed")
        with pytest.raises(GatewayError, match="nobody logs in to vault"):
            await user.log_in()
        with pytest.raises(GatewayError, match=r"no server 'nowhere'[^§]*vault"):
            find_server("nowhere", user.file)


async def test_configured_client_scopes_and_redirect_are_used_and_openid_metadata_is_found(tmp_path: Path) -> None:
    back = f"http://127.0.0.1:{free_port()}/oauth/back"
    oauth = {"client_id": "ours", "redirect_uri": back, "scopes": ["write", "read"]}
    async with user_of_protected_server(tmp_path, oauth=oauth) as user:
        user.authorization.clients["ours"] = None
        path = "/.well-known/oauth-authorization-server"
        user.authorization.misbehave[path] = lambda request: Response(status_code=404)
        await user.log_in()
        asked = user.authorization.paths("/authorize")[0]
        assert (asked["redirect_uri"], asked["scope"]) == (back, "write read")
        assert await user.call() == (Outcome.OK, "")


async def test_logout_revokes_and_removes_the_tokens(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        await user.log_out()
        assert not login_files() and user.authorization.refresh_tokens == {}
        assert (await user.call())[0] is Outcome.UNAVAILABLE
        await user.log_out()
        assert user.lines[-2:] == ["logged out of vault", "there was no login to vault"]


async def test_tokens_that_others_may_read_are_not_used(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        (file,) = login_files()
        file.chmod(0o644)
        outcome, reason = await user.call()
        assert outcome is Outcome.UNAVAILABLE and "chmod 600" in reason
        file.chmod(0o600)
        file.write_text("{")
        assert "is damaged" in (await user.call())[1]


async def test_another_address_never_gets_the_tokens_of_a_name(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path) as user:
        await user.log_in()
        async with serve_protected() as other:
            user.server = other
            user.configure()
            assert (await user.call())[0] is Outcome.UNAVAILABLE
            assert set(other.tokens_seen) == {""}


async def test_answer_with_another_state_is_refused_and_the_login_goes_on(tmp_path: Path) -> None:
    statuses: list[int] = []

    def browse(url: str) -> bool:
        """A page that guesses an answer before the person logs in."""
        back = parse_qs(urlsplit(url).query)["redirect_uri"][0]
        for query in ("?code=stolen&state=guessed", "?code=stolen", "/elsewhere"):
            with pytest.raises(urllib.error.HTTPError) as failure:
                urllib.request.urlopen(back + query, timeout=PATIENCE_S)
            statuses.append(failure.value.code)
            failure.value.close()
        return follow_redirects(url)

    async with user_of_protected_server(tmp_path) as user:
        await login_server(find_server("vault", user.file), user.lines.append, open_browser=browse, timeout_s=20)
        assert statuses == [400, 400, 404]
        assert await user.call() == (Outcome.OK, "")
