"""The folder of a rollout: made before its process starts, seeded, told to the process, and removed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from gateway.config.models import Server
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.toolset import Session
from gateway.types import Outcome, Task, ToolCall
from tests.mcp_client.mcp_toolsets import open_toolset
from tests.waiting import wait_until

NOTES_SERVER = str(Path(__file__).with_name("notes_server.py"))
FOLDER = "${MTRL_ROLLOUT_DIR}"


@asynccontextmanager
async def notes_toolset(**config: Any) -> AsyncIterator[McpToolset]:
    """A server that keeps a note in a folder."""
    fields = {"args": (NOTES_SERVER, FOLDER), "isolation": "process", **config}
    with anyio.fail_after(60):
        async with open_toolset(Server(command=sys.executable, **fields)) as server:
            yield server


async def call(session: Session, name: str, **arguments: Any) -> str:
    result = await session.call(ToolCall("1", name, json.dumps(arguments)))
    assert result.outcome is Outcome.OK, result
    return result.text


async def find_folder(session: Session) -> Path:
    return Path(bytes.fromhex(await call(session, "where")).decode())


async def test_each_rollout_has_a_folder_that_is_removed_with_it() -> None:
    async with notes_toolset() as server:
        async with server.open(Task("a")) as first, server.open(Task("b")) as second:
            await call(first, "write", text="only of a")
            assert (await call(first, "read"), await call(second, "read")) == ("only of a", "nothing")
            folders = [await find_folder(first), await find_folder(second)]
            assert all(folder.is_dir() for folder in folders) and folders[0] != folders[1]
            (folders[0] / "locked").mkdir()
            (folders[0] / "locked").chmod(0)
        await wait_until(lambda: not any(folder.exists() for folder in folders))


async def test_folder_begins_as_a_copy_of_the_state(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "deep").mkdir(parents=True)
    (state / "note.txt").write_text("as it was")
    (state / "deep" / "link").symlink_to("../note.txt")
    async with notes_toolset(state=state) as server, server.open(Task()) as session:
        assert await call(session, "read") == "as it was"
        assert (await find_folder(session) / "deep" / "link").is_symlink()
        await call(session, "write", text="changed")
    assert (state / "note.txt").read_text() == "as it was"


async def test_folders_are_kept_under_their_rollouts_names_on_request(tmp_path: Path) -> None:
    async with notes_toolset(keep_state=tmp_path / "kept") as server:
        for text in ("one", "two"):
            async with server.open(Task("a", rollout="a-0")) as session:
                await call(session, "write", text=text)
    notes = {folder.name: (folder / "note.txt").read_text() for folder in (tmp_path / "kept").iterdir()}
    assert notes == {"a-0": "one", "a-0-2": "two"}


async def test_rollout_has_its_name_and_its_tasks_seed() -> None:
    env = {"SEED": "${MTRL_SEED}", "ROLLOUT": "${MTRL_ROLLOUT_ID}"}
    async with notes_toolset(env=env, cwd=Path(FOLDER) / "work") as server:
        values = []
        for task in (Task("a", rollout="a-0"), Task("a", rollout="a-1"), Task("b", rollout="b-0")):
            async with server.open(task) as session:
                values.append(json.loads(await call(session, "environment")))
                assert values[-1]["cwd"] == "/rollout/work"
    assert [value["ROLLOUT"] for value in values] == ["a-0", "a-1", "b-0"]
    assert values[0]["SEED"] == values[1]["SEED"] != values[2]["SEED"]


async def test_policy_reads_and_writes_one_path_in_every_rollout() -> None:
    async with notes_toolset() as server, server.open(Task()) as session:
        assert await call(session, "path") == "/rollout/note.txt"
        await call(session, "write_to", path="/rollout/note.txt", text="see /rollout/note.txt, not /rollouts")
        assert await call(session, "read") == "see /rollout/note.txt, not /rollouts"
        failed = await session.call(ToolCall("1", "write_to", json.dumps({"path": "/rollout/no/such", "text": ""})))
        assert "/rollout/no/such" in failed.text and str(await find_folder(session)) not in failed.text


async def test_folder_is_removed_when_the_gateway_is_killed() -> None:
    script = """
import anyio, sys
from tests.mcp_client.test_rollout_folder import notes_toolset, find_folder
from gateway.types import Task

async def main():
    async with notes_toolset() as server, server.open(Task()) as session:
        print(await find_folder(session), flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""
    gateway = await anyio.open_process([sys.executable, "-c", script], stderr=None, cwd=Path(__file__).parents[2])
    assert gateway.stdout is not None
    with anyio.fail_after(60):
        folder = Path((await gateway.stdout.receive()).decode().strip())
        assert folder.exists()  # noqa: ASYNC240
        os.kill(gateway.pid, signal.SIGKILL)
        await gateway.wait()
    await gateway.aclose()
    await wait_until(lambda: not folder.exists())


async def test_state_that_cannot_be_copied_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with notes_toolset(state=tmp_path) as server:
        await wait_until(lambda: server.status.state == "down")
        assert "`state` cannot be copied" in server.status.reason and "pipe" in server.status.reason
