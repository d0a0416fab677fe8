"""What ends a container from outside is no failure of the policy, and what fills the machine's folders is one."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from gateway.errors import Unavailable
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.toolset import hash_session_state
from gateway.types import Outcome, ToolResult
from tests.plugins.sandboxes.test_sandbox_providers import call, engine_calls, find_processes, open_tools
from tests.waiting import wait_until


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
