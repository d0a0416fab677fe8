"""Credentials without a person: OAuth client credentials by secret or signed JWT, and tokens that a command prints."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from gateway.mcp_client.auth import auth_command
from gateway.mcp_client.auth.auth_command import run_command
from gateway.mcp_client.auth.token_file import state_folder
from gateway.types import Outcome
from tests.mcp_client.auth.authorization_server import AuthorizationServer
from tests.mcp_client.auth.protected_user import user_of_protected_server
from tests.mcp_client.mcp_toolsets import call_tool
from tests.waiting import PATIENCE_S, wait_until

JOB = {"grant": "client_credentials", "client_id": "job", "client_secret": "hunter2: job+"}


@pytest.mark.parametrize("method", ["client_secret_basic", "client_secret_post"])
async def test_job_gets_its_token_by_its_secret(method: str, tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path, oauth=JOB) as user:
        user.authorization.clients["job"] = JOB["client_secret"]
        user.authorization.auth_methods = (method,)
        assert await user.call() == (Outcome.OK, "")
        (form,) = user.authorization.paths("/token")
        assert form["resource"] == user.server.url and form["scope"] == "read"
        assert ("client_secret" in form) == (method == "client_secret_post")
        assert not state_folder().exists(), "a job's tokens are kept in memory"


async def test_job_steps_up_to_a_missing_scope_by_itself_and_says_what_is_refused(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path, oauth=JOB) as user:
        user.authorization.clients["job"] = JOB["client_secret"]
        async with user.toolset() as toolset:
            assert (await call_tool(toolset, "write")).outcome is Outcome.OK
            assert (await call_tool(toolset, "read")).outcome is Outcome.OK
        assert [form["scope"].split() for form in user.authorization.paths("/token")] == [["read"], ["read", "write"]]
        user.configure(oauth={**JOB, "client_secret": "hunter2 too"})
        assert "invalid_client (unknown client)" in (await user.call())[1]
        user.configure(oauth={**JOB, "client_secret": None, "private_key": "hunter2", "issuer": user.authorization.url})
        reason = (await user.call())[1]
        assert "private key" in reason and "hunter2" not in reason


class OnlyReading(dict[str, str]):
    def __setitem__(self, token: str, scope: str) -> None:
        super().__setitem__(token, "read")


async def test_scope_that_is_never_granted_is_asked_for_once(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path, oauth=JOB) as user:
        user.authorization.clients["job"] = JOB["client_secret"]
        user.authorization.tokens = OnlyReading()
        outcome, reason = await user.call("write")
        assert outcome is Outcome.UNAVAILABLE and "asked for already" in reason
        assert len(user.authorization.paths("/token")) == 2


async def test_job_gets_a_new_token_when_the_old_one_expires_or_is_rejected(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path, oauth=JOB) as user:
        user.authorization.clients["job"] = JOB["client_secret"]
        user.authorization.expires_in = 1
        async with user.toolset() as toolset:
            assert (await call_tool(toolset, "read")).outcome is Outcome.OK
            renewed = len(user.authorization.paths("/token"))
            user.authorization.expires_in = 3600
            assert (await call_tool(toolset, "read")).outcome is Outcome.OK
            assert len(user.authorization.paths("/token")) == renewed + 1
            user.authorization.tokens.clear()
            assert (await call_tool(toolset, "read")).outcome is Outcome.OK
            assert len(user.authorization.paths("/token")) == renewed + 2


KEYS: dict[str, PrivateKeyTypes] = {
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "ES384": ec.generate_private_key(ec.SECP384R1()),
    "RS256": rsa.generate_private_key(65537, 2048),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


def to_pem(key: PrivateKeyTypes) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


@pytest.mark.parametrize("algorithm", KEYS)
async def test_job_proves_itself_with_a_jwt_for_this_authorization_server(algorithm: str, tmp_path: Path) -> None:
    key = KEYS[algorithm]
    (tmp_path / "job.pem").write_text(to_pem(key))
    oauth = {"grant": "client_credentials", "client_id": "job", "private_key_file": "job.pem"}
    async with user_of_protected_server(tmp_path, oauth=oauth) as user:
        user.authorization.check_assertion = lambda assertion: check_jwt(user.authorization, algorithm, assertion)
        assert await user.call() == (Outcome.OK, "")


def check_jwt(server: AuthorizationServer, algorithm: str, assertion: str) -> str:
    public = KEYS[algorithm].public_key()
    claims = jwt.decode(assertion, public, [algorithm], audience=server.url)  # type: ignore[arg-type]
    assert claims["iss"] == claims["sub"] == "job" and claims["exp"] - claims["iat"] <= 300
    return str(claims["sub"])


TOKEN_PROGRAM = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text() or 0) + 1 if count.exists() else 1
count.write_text(str(number))
headers = {"Authorization": f"Bearer printed-{number}", "X-Team": "blue"}
print(json.dumps(headers) if "json" in sys.argv else f"printed-{number}")
"""


@pytest.mark.parametrize("form", ["text", "json"])
async def test_command_prints_the_token_and_runs_again_when_it_is_rejected(form: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = [sys.executable, "-c", TOKEN_PROGRAM, str(count), form]
    async with user_of_protected_server(tmp_path, auth_command=command) as user:
        user.authorization.tokens |= {"printed-1": "read", "printed-2": "read"}
        async with user.toolset() as toolset:
            assert (await call_tool(toolset, "read")).outcome is Outcome.OK
            assert count.read_text() == "1"
            del user.authorization.tokens["printed-1"]
            assert (await call_tool(toolset, "read")).outcome is Outcome.OK
            assert count.read_text() == "2"
            user.authorization.tokens.clear()
            result = await call_tool(toolset, "read")
            assert result.outcome is Outcome.UNAVAILABLE and "by hand" in (result.reason or "")
            assert int(count.read_text()) <= 4, "a token that is never good does not loop"


HELD_PROGRAM = """
import pathlib, sys, time
while pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
print("printed")
"""


async def test_slow_command_is_not_taken_for_the_silence_of_its_server(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    command = [sys.executable, "-c", HELD_PROGRAM, str(hold)]
    settings = {"auth_command": command, "auth_refresh_s": 1e-6, "ping_s": 0.5, "ping_timeout_s": PATIENCE_S}
    async with user_of_protected_server(tmp_path, **settings) as user:
        user.authorization.tokens["printed"] = "read"
        async with user.toolset() as toolset:
            (connection,) = toolset.pool.connections
            hold.touch()
            health = connection.health
            health._config = health._config.model_copy(update={"ping_timeout_s": 0.2, "timeouts_in_a_row": 1})
            await wait_until(lambda: health.doubt is not None)
            asked_at = anyio.current_time()
            with anyio.move_on_after(0.2):
                await call_tool(toolset, "read")
            await wait_until(lambda: anyio.current_time() > asked_at + 1)
            assert health.doubt is not None and health.timeouts == 0 and connection.is_usable
            health._config = health._config.model_copy(update={"ping_timeout_s": PATIENCE_S})
            hold.unlink()
            assert (await call_tool(toolset, "read")).outcome is Outcome.OK
            assert toolset.status.reconnects == 0


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("print()", "printed nothing"),
        ("print('hunter2 and more')", "more than one word"),
        ("print('{hunter2')", "does not begin a JSON object"),
        ("print('{\"A\": 1}')", "not all text"),
        ('print(\'{"A b": "hunter2"}\')', "a header name"),
        ("import sys; sys.stdout.buffer.write(b'hunter2\\xff')", "not text"),
        ("while True: print('hunter2' * 1000)", "printed more than"),
        ("print('hunter2é')", "characters that headers cannot have"),
    ],
)
async def test_command_that_fails_is_named_without_its_output(program: str, expected: str, tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path, auth_command=[sys.executable, "-c", program]) as user:
        outcome, reason = await user.call()
        assert outcome is Outcome.UNAVAILABLE and "`auth_command`" in reason and expected in reason
        assert "hunter2" not in reason


async def test_command_that_never_ends_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_command, "COMMAND_S", 0.5)
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    with anyio.fail_after(PATIENCE_S), pytest.raises(ValueError, match=r"did not end within 0\.5 s"):
        await run_command([sys.executable, "-c", program])
    with pytest.raises(ValueError, match="cannot be started"):
        await run_command(["/no/such/program"])
