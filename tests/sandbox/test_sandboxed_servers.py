"""MCP servers with `isolation: sandbox`: they serve as others do, and see only what is theirs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from gateway.config.models import Limits
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.rollout_folder import LISTING
from gateway.state.state_hash import has_hash_form
from gateway.toolset import Session, hash_session_state
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.mcp_client.test_rollout_folder import call, find_folder, notes_toolset
from tests.sandbox.conftest import SMALL, open_session
from tests.sandbox.conftest import call as call_tool
from tests.waiting import PATIENCE_S, wait_until


async def test_each_rollout_has_a_server_that_writes_to_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("kept")
    async with notes_toolset(isolation="sandbox") as server:
        async with server.open(Task("a")) as first, server.open(Task("b")) as second:
            await call(first, "write", text="only of a")
            assert (await call(first, "read"), await call(second, "read")) == ("only of a", "nothing")
            folders = [await find_folder(first), await find_folder(second)]
            for target in (folders[0] / "note.txt", tmp_path / "secret"):
                arguments = f'{{"path": "{target}", "text": "stolen"}}'
                written = await second.call(ToolCall("1", "write_to", arguments))
                assert written.outcome is Outcome.ERROR, written
            assert await call(first, "read") == "only of a"
        await wait_until(lambda: not any(folder.exists() for folder in folders))
    assert (tmp_path / "secret").read_text() == "kept"


async def test_server_that_its_policy_crashes_is_the_policys_error_also_in_later_calls() -> None:
    async with notes_toolset(isolation="sandbox") as server, server.open(Task("a", hash_state=True)) as session:
        crashed = await session.call(ToolCall("1", "write_to", '{"path": "x"}'))  # It lacks an argument.
        later = await session.call(ToolCall("2", "read", "{}"))
        state = await hash_session_state(session)
    assert state is not None and not has_hash_form(state)  # Scored, as a state that differs from all.
    for result in (crashed, later):
        assert result.outcome is Outcome.ERROR and "TypeError" in str(result.reason), result
        assert result.text == "The server of this tool was ended: its processes ended it. It does not come back."
    async with notes_toolset() as server, server.open(Task("a")) as session:  # Outside, it may have done its work.
        assert (await session.call(ToolCall("1", "write_to", '{"path": "x"}'))).outcome is Outcome.UNKNOWN


async def test_server_whose_sandbox_is_ended_from_outside_ends_unknown() -> None:
    async with notes_toolset(isolation="sandbox") as server, server.open(Task("a")) as session:
        await call(session, "read")
        leased = max(server.pool.connections, key=lambda connection: connection.transport.rollout is not LISTING)
        assert leased.transport.child is not None and leased.transport.child.pid is not None
        folder = await find_folder(session)
        fifo = folder / "fifo"
        os.mkfifo(fifo)
        fifo.chmod(0o666)
        results = []

        async def wait_inside() -> None:
            results.append(await session.call(ToolCall("1", "write_to", json.dumps({"path": str(fifo), "text": "x"}))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_inside)
            await wait_until(lambda: bool(leased.pending))
            os.kill(leased.transport.child.pid, signal.SIGKILL)
    assert results[0].outcome is Outcome.UNKNOWN, results


@asynccontextmanager
async def limited_session(server: McpToolset, timeout_s: float = 2.0) -> AsyncIterator[tuple[Session, ToolCall]]:
    """A session whose calls have a deadline, and a call that waits for the other end of a pipe: it hangs the server."""
    limited = LimitedToolset(server, Limits(timeout_s=timeout_s))
    async with limited.open(Task("a", hash_state=True)) as session:
        fifo = await find_folder(session) / "fifo"
        os.mkfifo(fifo)
        fifo.chmod(0o666)
        yield session, ToolCall("1", "write_to", json.dumps({"path": str(fifo), "text": "x"}))


async def test_server_that_its_policy_hangs_is_the_policys_error_also_in_later_calls() -> None:
    hung = {"isolation": "sandbox", "ping_timeout_s": 0.2}
    async with notes_toolset(**hung) as server, limited_session(server) as (session, hanging):
        late = await session.call(hanging)
        assert late.outcome is Outcome.ERROR and late.text == "The server of this tool did not answer in time.", late
        leased = max(server.pool.connections, key=lambda connection: connection.transport.rollout is not LISTING)
        with anyio.fail_after(PATIENCE_S):
            await leased.released.wait()
        later = await session.call(ToolCall("2", "read", "{}"))
        state = await hash_session_state(session)
    assert later.outcome is Outcome.ERROR and "it hangs. It does not come back" in later.text, later
    assert state == "ended: it hangs"


async def test_server_reaches_its_list_of_hosts_through_a_proxy() -> None:
    settings = {"network": ["pypi.org"]}
    async with notes_toolset(isolation="sandbox", sandbox=settings) as server, server.open(Task("a")) as session:
        environment = json.loads(await call(session, "environment"))
    assert environment["HTTPS_PROXY"] == "http://127.0.0.1:3128"


async def test_rollouts_folder_may_not_grow_beyond_the_limit() -> None:
    settings = {"disk_mb": 4, "files": 100}
    async with notes_toolset(isolation="sandbox", sandbox=settings) as server, server.open(Task("a")) as session:
        results: list[ToolResult] = []

        async def fill() -> None:
            for number in range(10_000):
                arguments = json.dumps({"path": f"/rollout/{number % 4}", "text": "x" * 2**21})
                results.append(await session.call(ToolCall("1", "write_to", arguments)))
                if results[-1].outcome is not Outcome.OK:
                    return

        with anyio.fail_after(PATIENCE_S):
            await fill()
    assert results[-1].outcome is Outcome.ERROR
    assert "it wrote more than 4 MB to folders of the machine" in str(results[-1].reason)


HIDDEN = {
    "in files": ("for n in range(4): open(f'{folder}/{n}', 'wb').write(bytes(2**21))", "more than 4 MB"),
    "in removed files": (
        "kept = []\nfor n in range(4):\n kept.append(open(f'{folder}/f', 'wb', 0)); kept[n].write(b'x' * 2**21)\n"
        " os.unlink(f'{folder}/f')",
        "more than 4 MB",
    ),
    "in mapped files": (
        "import mmap\nkept = []\nfor n in range(4):\n with open(f'{folder}/f', 'wb+') as f:\n"
        "  f.write(b'x' * 2**21); f.flush(); kept.append(mmap.mmap(f.fileno(), 2**21))\n os.unlink(f'{folder}/f')",
        "more than 4 MB",
    ),
    "in names": ("for n in range(300): open(f'{folder}/{n}', 'w')", "more than 100 files"),
    "too deep to be looked at": (
        "os.chdir('{folder}')\nfor n in range(40): os.mkdir('d' * 200); os.chdir('d' * 200)",
        "it hid what it wrote",
    ),
}


@pytest.mark.parametrize("trick", HIDDEN)
async def test_writable_folders_may_not_grow_beyond_the_limit_however_it_is_hidden(trick: str, tmp_path: Path) -> None:
    code, reason = HIDDEN[trick]
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "before").write_bytes(bytes(2**23))
    settings = SMALL.model_copy(update={"disk_mb": 4, "files": 100, "writable": (shared,)})
    async with open_session(settings) as session:
        text = f"import os, time\n{code.format(folder=shared, n='{n}')}\ntime.sleep(600)"
        result = await call_tool(session, "python", code=text)
    assert result.outcome is Outcome.ERROR and reason in str(result.reason), result
