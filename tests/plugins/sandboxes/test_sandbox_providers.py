"""Sandboxes in containers and on other machines: the tools work as in bubblewrap; no failure there is the policy's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gateway import check
from gateway.build import build_plan
from gateway.cli import app
from gateway.errors import Unavailable
from gateway.process.reaper import Reaper
from gateway.sandbox.choose_provider import choose_provider, find_provider_problem
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_state import SandboxStates
from gateway.sandbox.sandbox_toolset import SandboxToolset
from gateway.state.prepared_state import PreparedStates
from gateway.state.state_hash import hash_state
from gateway.toolset import Session, hash_session_state
from gateway.types import Image, Outcome, Task, ToolCall, ToolResult
from mtrl_plugins.sandboxes import remote_provider
from mtrl_plugins.sandboxes.machines import PATH
from tests.conftest import Write
from tests.plugins.sandboxes.conftest import LEASE_S, TOKEN, Served
from tests.waiting import PATIENCE_S, wait_until

PNG = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nNone"


@asynccontextmanager
async def open_tools(settings: SandboxSettings, state: Path | None = None) -> AsyncIterator[Session]:
    reaper = Reaper()
    try:
        toolset = SandboxToolset(("python", "shell", "files"), settings, choose_provider(settings, reaper))
        toolset.states = SandboxStates(PreparedStates(state, None), reaper)
        async with toolset.open(Task()) as session:
            yield session
    finally:
        with anyio.CancelScope(shield=True):
            await reaper.stop()


async def call(session: Session, name: str, **arguments: Any) -> ToolResult:
    with anyio.fail_after(PATIENCE_S):
        return await session.call(ToolCall("1", name, json.dumps(arguments)))


async def assert_tools_work(session: Session) -> None:
    assert (await call(session, "python", code="x = 20\nx + 1")).text == "21"
    assert (await call(session, "python", code="print(x)")).text == "20"
    assert (await call(session, "shell", command="echo one > a.txt; pwd; exit 3")).text == "/rollout\n[exit status 3]"
    assert (await call(session, "files", action="read", path="a.txt")).text == "one"
    assert "was written" in (await call(session, "files", action="write", path="b/c.txt", text="two")).text
    assert (await call(session, "files", action="read", path="no")).outcome is Outcome.ERROR
    assert isinstance((await call(session, "python", code=PNG)).parts[-1], Image)
    raised = await call(session, "python", code="1 / 0")
    assert raised.outcome is Outcome.ERROR and "ZeroDivisionError" in str(raised.reason)
    ended = await call(session, "python", code="import os; os.kill(os.getppid(), 9)")
    assert ended.outcome is Outcome.ERROR and "the sandbox was ended" in str(ended.reason)
    assert (await call(session, "python", code="2")).text == "2"


def engine_calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


async def test_tools_work_in_a_container_with_all_limits_and_it_is_removed(
    engine: SandboxSettings, tmp_path: Path
) -> None:
    async with open_tools(engine) as session:
        assert (await call(session, "python", code="import os; os.environ['TOKEN']")).text == "'s3cret'"
        await assert_tools_work(session)
    first, *others = engine_calls(tmp_path)
    wanted = (
        "--rm", "--interactive", "--pull=never", "--network=none", "--read-only", "--cap-drop=ALL", "--memory=100m",
        "--memory-swap=100m", "--cpus=1", "--pids-limit=20", "--security-opt=no-new-privileges", "--user=65534:65534",
    )  # fmt: skip
    assert first[0] == "run" and not set(wanted) - set(first)
    assert not any("s3cret" in word or "TOKEN" in word for words in (first, *others) for word in words)
    assert "TOKEN" not in json.loads((tmp_path / "environment").read_text())
    names = {word for words in (first, *others) for word in words if word.startswith("--name=")}
    assert {f"--name={words[-1]}" for words in others if words[0] == "rm"} == names and len(names) == 2


@pytest.mark.parametrize("provider", ["engine", "server"])
async def test_sandboxes_of_each_provider_begin_from_a_state_and_end_with_its_hash(
    provider: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    chosen = request.getfixturevalue(provider)
    settings = chosen if provider == "engine" else chosen[0]
    state = tmp_path / "state"
    state.mkdir()
    (state / "a.txt").write_text("one\n")
    async with open_tools(settings, state) as session:
        assert (await call(session, "shell", command="cat a.txt")).text == "one"
        assert await hash_session_state(session) == hash_state(state)
        await call(session, "shell", command="echo two >> a.txt")
        (state / "a.txt").write_text("one\ntwo\n")
        assert await hash_session_state(session) == hash_state(state)


async def test_engine_that_fails_at_the_start_is_unavailable(engine: SandboxSettings, tmp_path: Path) -> None:
    (tmp_path / "fails").write_text("125")
    assert "the engine is down" in str(find_provider_problem(engine))
    async with open_tools(engine) as session:
        failed = await call(session, "python", code="1")
        assert failed.outcome is Outcome.UNAVAILABLE and "the engine is down" in str(failed.reason)
        (tmp_path / "fails").unlink()
        assert (await call(session, "python", code="1")).text == "1"


async def test_engine_that_is_ended_in_a_call_is_no_failure_of_the_policy(
    engine: SandboxSettings, tmp_path: Path
) -> None:
    async with open_tools(engine) as session:
        await call(session, "python", code="1")
        results: list[ToolResult] = []

        async def wait_inside() -> None:
            results.append(await call(session, "shell", command="sleep 600"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_inside)
            await anyio.wait_all_tasks_blocked()
            for pid in find_processes(f"{tmp_path}\0run"):
                os.kill(pid, 9)
    assert results[0].outcome is Outcome.UNKNOWN, results


KILLED_GATEWAY = """
import anyio, sys
from gateway.sandbox.sandbox_settings import SandboxSettings
from tests.plugins.sandboxes.test_sandbox_providers import call, open_tools
async def main():
    async with open_tools(SandboxSettings.model_validate_json(sys.argv[1])) as session:
        print((await call(session, "python", code="1")).text, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def test_container_of_a_gateway_that_is_killed_is_removed(engine: SandboxSettings, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_GATEWAY, engine.model_dump_json()]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as gateway:
        assert gateway.stdout is not None
        printed = gateway.stdout.readline()
        gateway.kill()  # Whatever it printed: the block waits for its end.
    assert printed == "1\n"
    anyio.run(wait_until, lambda: engine_calls(tmp_path)[-1][0] == "rm")


async def test_engine_that_is_not_installed_is_told(engine: SandboxSettings) -> None:
    assert engine.container is not None
    absent = engine.container.model_copy(update={"engine": "no-such-engine"})
    settings = engine.model_copy(update={"container": absent})
    assert "no-such-engine does not run" in str(find_provider_problem(settings))
    async with open_tools(settings) as session:
        assert (await call(session, "python", code="1")).outcome is Outcome.UNAVAILABLE


def find_processes(words: str) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


async def test_tools_work_on_a_server_and_its_sandboxes_end_with_the_rollout(server: Served) -> None:
    settings, running = server
    assert find_provider_problem(settings) is None
    async with open_tools(settings) as session:
        await assert_tools_work(session)
        (lease,) = running.leases.values()
        first = lease.ends
        await wait_until(lambda: lease.ends > first + 1.5 * LEASE_S)  # By signs of life alone.
        assert (await call(session, "python", code="3")).text == "3"
    assert running.leases == {}


async def test_code_over_its_time_on_a_server_tells_what_it_printed(server: Served) -> None:
    async with open_tools(server[0]) as session:
        await call(session, "python", code="x = 7")
        with anyio.fail_after(12):
            late = await session.call(ToolCall("1", "python", '{"code": "print(\'begun\')\\nwhile True: pass"}'))
        assert late.outcome is Outcome.ERROR and "begun" in late.text, late
        assert (await call(session, "python", code="x")).text == "7"


async def test_leases_that_end_while_their_clients_stop_them_end_no_others(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, running = server
    async with open_tools(settings) as kept:
        await call(kept, "python", code="x = 1")
        with monkeypatch.context() as patched:
            patched.setattr(remote_provider.HEARTBEATS, "add", lambda *_: None)
            async with open_tools(settings) as gone:
                await call(gone, "python", code="1")
                await wait_until(lambda: len(running.leases) == 1)
        assert (await call(kept, "python", code="x")).text == "1"


async def test_sandbox_of_a_client_that_is_gone_ends_with_its_lease(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, running = server
    monkeypatch.setattr(remote_provider.HEARTBEATS, "add", lambda *_: None)
    async with open_tools(settings) as session:
        await call(session, "python", code="x = 1")
        await wait_until(lambda: not running.leases)
        gone = await call(session, "python", code="x")
        assert gone.outcome is Outcome.UNAVAILABLE and "not there any more" in str(gone.reason)
        after = await call(session, "python", code="1")
        assert after.outcome is Outcome.UNAVAILABLE and "lost with its files" in str(after.reason)


async def test_server_that_fails_in_a_call_is_no_failure_of_the_policy(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, running = server
    async with open_tools(settings) as session:
        await call(session, "python", code="1")

        async def broken(*_: Any) -> Any:
            raise RuntimeError("a fault of the server")

        monkeypatch.setattr(next(iter(running.leases.values())).sandbox, "run_python", broken)
        failed = await call(session, "python", code="1")
    assert failed.outcome is Outcome.UNAVAILABLE and "HTTP 500" in str(failed.reason)


async def test_server_that_is_not_there_is_unavailable_and_told_by_check(write: Write) -> None:
    settings = SandboxSettings.model_validate({"remote": {"url": "http://127.0.0.1:9"}})
    async with open_tools(settings) as session:
        assert (await call(session, "python", code="1")).outcome is Outcome.UNAVAILABLE
    file = write("tools.yaml", "tools: [{sandbox_tools: [python], sandbox: {remote: {url: 'http://127.0.0.1:9'}}}]")
    findings = await check.run_checks(build_plan(file, None))
    (found,) = [finding for finding in findings if "sandboxes" in finding.text]
    assert found.grade == "wrong" and "cannot be reached" in found.text and "mtrl-gateway sandboxes" in found.remedy


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"container": {"image": "a"}, "remote": {"url": "http://a"}}, "exclude each other"),
        ({"container": {}}, "either an `image` or a `root`"),
        ({"container": {"image": "a"}, "root": "b"}, "either an `image` or a `root`"),
        ({"remote": {"url": "http://a"}, "readable": ["/data"]}, "do not exist on another one"),
        ({"remote": {"url": "ftp://a"}}, "url"),
        ({"remote": {"url": "http://a,http://boxes:99999"}}, "'http://boxes:99999' is no address"),
        ({"remote": {"url": "http://a..b:80"}}, "is no address"),
        ({"remote": {"url": "http://[::1"}}, "is no address"),
        ({"remote": {"url": f"http://{'a' * 64}.b"}}, "is no address"),
        ({"remote": {"url": "http://:80"}}, "is no address"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        SandboxSettings.model_validate(settings)


@pytest.mark.parametrize("when", ["in a call", "between calls"])
async def test_container_that_is_ended_from_outside_is_no_failure_of_the_policy(
    when: str, engine: SandboxSettings, tmp_path: Path
) -> None:
    results: list[ToolResult] = []
    (tmp_path / "state").mkdir()
    async with open_tools(engine, tmp_path / "state") as session:
        pids = (await call(session, "shell", command="readlink /proc/self/ns/pid")).text
        servers = [pid for pid in find_processes("/mtrl/command_server.py") if _namespace(pid) == pids]
        first = min(servers, key=_pid_inside)

        async def wait_inside() -> None:
            results.append(await call(session, "shell", command="sleep 600"))

        async with anyio.create_task_group() as tasks:
            if when == "in a call":
                tasks.start_soon(wait_inside)
                await wait_until(lambda: any(_namespace(pid) == pids for pid in find_processes("sleep\x00600")))
            os.kill(first, 9)
            if when == "between calls":
                await wait_until(lambda: not find_processes(f"{tmp_path}\0run"))
                await wait_inside()
        assert results[0].outcome.is_infrastructure and "from outside, by signal 9" in str(results[0].reason), results
        with pytest.raises(Unavailable, match="was lost"):
            await hash_session_state(session)


def _pid_inside(pid: int) -> int:
    """The id of a process in its own namespace, whose ids begin anew; those outside begin anew after the greatest."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


async def test_container_may_not_fill_writable_folders(engine: SandboxSettings, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    settings = engine.model_copy(update={"writable": (shared,), "disk_mb": 4})
    async with open_tools(settings) as session:
        code = f"import time\nfor n in range(4): open(f'{shared}/{{n}}', 'wb').write(bytes(2**21))\ntime.sleep(600)"
        full = await call(session, "python", code=code)
    assert full.outcome is Outcome.ERROR and "more than 4 MB to folders" in str(full.reason), full
    assert any(words[0] == "kill" for words in engine_calls(tmp_path))


LATE = {"timeout_s": 5, "answer_within_s": 10}
OUTSIDE = {
    "a port of the machine": {"network": ["127.0.0.1:22"]},
    "its name": {"network": ["localhost:22"]},
    "its port by version 6": {"network": ["[::1]:22"]},
    "an address within another": {"network": ["[::ffff:127.0.0.1]:22"]},
    "an address of its network": {"network": ["10.0.0.5"]},
    "the service of a cloud": {"network": ["169.254.169.254"]},
    "another port of an allowed host": {"network": ["pypi.org:22"]},
    "a host beside allowed ones": {"network": ["pypi.org", "evil.example"]},
    "more hosts than are allowed": {"network": ["*.org:8443"]},
    "a file of the machine": {"readable": ["/etc/shadow"]},
    "a folder of the machine": {"writable": ["/home"]},
    "a path with a zero byte": {"readable": ["/usr\0/etc"]},
    "another engine": {"container": {"image": "a", "engine": "sh -c 'touch /tmp/here'"}},
    "another server": {"remote": {"url": "http://127.0.0.1:22"}},
    "a zero byte in a value": {"env": {"A": "x\0--share-net"}},
    "a zero byte in a name": {"env": {"A\0--share-net": "x"}},
    "a function of the shell": {"env": {"BASH_FUNC_mount%%": "() { :; }"}},
    "no limit on the disk": {"disk_mb": 10**15},
    "no limit on memory": {"memory_mb": 10**15},
    "an unknown setting": {"privileged": True},
}
COMMANDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no command": ("run", {"command": []}, "422"),
    "neither command nor code": ("run", {}, "422"),
    "a command of no name": ("run", {"command": [""]}, "error"),
    "a command with a zero byte": ("run", {"command": ["echo\0", "a"]}, "error"),
    "an argument with a zero byte": ("run", {"command": ["echo", "a\0b"]}, "error"),
    "input that is no base64": ("run", {"command": ["cat"], "stdin": "?"}, "422"),
    "a run without end": ("run", {"command": ["cat"], "timeout_s": 1e9}, "422"),
    "a path with a zero byte": ("get", {"path": "/etc\0/passwd", "max_bytes": 10}, "error"),
    "a file of the machine": ("get", {"path": "/etc/passwd", "max_bytes": 10}, "error"),
    "a way out of the folder": ("get", {"path": "../../../etc/passwd", "max_bytes": 10}, "error"),
    "a file of the system": ("put", {"path": "/usr/bin/env", "data": ""}, "error"),
    "a new name with a zero byte": ("put", {"path": "a\0b", "data": ""}, "error"),
    "a part before the file": ("get", {"path": "a", "max_bytes": 10, "offset": -1}, "422"),
}


def client(served: Served) -> httpx2.AsyncClient:
    remote = served[0].remote
    assert remote is not None
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    return httpx2.AsyncClient(base_url=remote.url, headers=headers, timeout=60, trust_env=False)


async def test_client_starts_no_sandbox_with_what_is_outside_and_reaches_nothing_by_commands(server: Served) -> None:
    async with client(server) as http:
        for name, settings in OUTSIDE.items():
            answer = await http.post(PATH, content=json.dumps({"settings": settings}))
            assert answer.status_code == 422 and answer.json()["error"]["message"], (name, answer.text)
        assert (await http.get(PATH)).json()["running"] == 0
        place = (await http.post(PATH, content=b"{}")).json()["id"]
        for name, (verb, body, wanted) in COMMANDS.items():
            answer = await http.post(f"{PATH}/{place}/{verb}", content=json.dumps(LATE | body))
            found = str(answer.status_code) if answer.status_code != 200 else next(iter(answer.json()))
            assert found == wanted, (name, answer.text)
        done = await http.post(f"{PATH}/{place}/run", content=json.dumps(LATE | {"command": ["echo", "alive"]}))
        assert done.json()["stdout"] == "alive\n"
        await http.delete(f"{PATH}/{place}")


async def test_hosts_that_the_server_allows_may_be_listed_and_others_are_told(server: Served) -> None:
    allowed = ("pypi.org", "pypi.org:443", "a.example.org:8443", "*.b.example.org:8443", "10.0.0.5:8080")
    async with open_tools(server[0].model_copy(update={"network": allowed})) as session:
        assert (await call(session, "python", code="1")).text == "1"
    async with open_tools(server[0].model_copy(update={"network": ("pypi.org", "127.0.0.1:22")})) as session:
        refused = await call(session, "python", code="1")
    assert refused.outcome is Outcome.UNAVAILABLE
    problem = (
        "does not allow hosts that `network` lists: 127.0.0.1:22. Start `mtrl-gateway sandboxes` with `--allow-host"
    )
    assert problem in str(refused.reason), "the remedy reaches the client"


def test_mistake_in_an_allowed_host_is_told_with_its_option() -> None:
    done = CliRunner().invoke(app, ["sandboxes", "--port", "0", "--allow-host", "http://pypi.org"])
    assert done.exit_code == 2 and "--allow-host: " in done.output and "write names such as `pypi.org`" in done.output
