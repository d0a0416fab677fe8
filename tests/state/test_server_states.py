"""Servers that begin from prepared states: the default, a task's own, archives; and the hash at a session's end."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.client import RemoteGateway
from gateway.errors import SessionError
from gateway.gateway import Gateway
from gateway.state.state_hash import hash_state
from gateway.tape import RecordedGateway, ReplayGateway
from gateway.types import Outcome, Task, ToolCall
from tests.live_server import live_server_async

NOTES_SERVER = str(Path(__file__).parents[1] / "mcp_client" / "notes_server.py")
FOLDER = "${MTRL_ROLLOUT_DIR}"


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A folder with the states `one` and `two`, the second as an archive."""
    for name in ("one", "two"):
        (tmp_path / "states" / name).mkdir(parents=True)
        (tmp_path / "states" / name / "note.txt").write_text(f"note of {name}")
    shutil.make_archive(str(tmp_path / "states" / "two"), "gztar", tmp_path / "states" / "two")
    shutil.rmtree(tmp_path / "states" / "two")
    return tmp_path / "states"


def make_gateway(folder: Path, **settings: Any) -> Gateway:
    entry = {"command": sys.executable, "args": [NOTES_SERVER, FOLDER], "isolation": "process", **settings}
    file = folder / "mcp_servers.json"
    file.write_text(json.dumps({"mcpServers": {"notes": entry}}))
    return Gateway.load(None, file)


@asynccontextmanager
async def open_gateway(folder: Path, **settings: Any) -> AsyncIterator[Gateway]:
    with anyio.fail_after(60):
        async with make_gateway(folder, **settings) as gateway:
            yield gateway


async def play(gateway: Any, task: Task, *texts: str) -> tuple[str, dict[str, str]]:
    """Reads the note, writes texts, and finishes: the note as it was, and the hashes at the end."""
    async with gateway.open(task) as session:
        note = await session.call(ToolCall("1", "read", "{}"))
        for text in texts:
            assert (await session.call(ToolCall("2", "write", json.dumps({"text": text})))).outcome is Outcome.OK
        await session.finish()
        return note.text, dict(session.states)


async def test_task_begins_from_the_state_that_it_names_and_changes_only_its_copy(tmp_path: Path, states: Path) -> None:
    before = hash_state(states)
    async with open_gateway(tmp_path, state="states/one", states="states") as gateway:
        notes = [(await play(gateway, Task(state=name), "changed"))[0] for name in ("", "one", "two")]
    assert notes == ["note of one", "note of one", "note of two"]
    assert hash_state(states) == before


async def test_states_of_other_names_and_places_are_refused(tmp_path: Path, states: Path) -> None:
    (tmp_path / "secret").mkdir()
    (states / "link").symlink_to(tmp_path / "secret")
    async with open_gateway(tmp_path, states="states") as gateway:
        for name in ("three", "../secret", "/etc", "link", "one/../../secret", "x" * 300, "\0"):
            with pytest.raises(SessionError, match="state"):
                await gateway.begin(Task(state=name))


async def test_rollouts_that_did_the_same_end_with_the_same_hash(tmp_path: Path, states: Path) -> None:
    task = Task(hash_state=True)
    async with open_gateway(tmp_path, state="states/one") as gateway:
        (_, first), (_, second), (_, other) = [await play(gateway, task, text) for text in ("a", "a", "b")]
        assert first == second != other and list(first) == ["notes"]
        _, unasked = await play(gateway, Task(), "a")
        assert unasked == {}


async def test_hash_reaches_remote_clients_and_tapes(tmp_path: Path, states: Path) -> None:
    task, tape = Task("t", hash_state=True), tmp_path / "tape.jsonl"
    async with RecordedGateway(make_gateway(tmp_path, state="states/one"), tape) as recorded:
        _, here = await play(recorded, task, "a")
    async with ReplayGateway(tape) as replay:
        _, replayed = await play(replay, task, "a")
    make = partial(make_gateway, tmp_path, state="states/one")
    async with live_server_async(make) as live, RemoteGateway(live.url) as remote:
        _, there = await play(remote, task, "a")
    assert here == replayed != {}
    assert there == here
