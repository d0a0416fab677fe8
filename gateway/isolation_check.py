"""Tries whether the sessions of an isolated stdio server share files: one session writes, another reads.

It can be tried with servers whose tools are known; for others it is compared which files two sessions have open for
writing, which shows a database, and not a file that is opened for a moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio

from gateway.mcp_client.errors import UpstreamError
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.rollout_folder import RolloutIdentity
from gateway.toolset import Session
from gateway.types import Outcome, Task, ToolCall, ToolResult

CHECK_S = 30.0
"""Deadline of the check of one server."""
MARK = "MARK"
"""Stands in arguments for a word that no other session writes."""


@dataclass(frozen=True)
class KnownServer:
    """Tools of a known kind of server, by which something can be written, read and removed again."""

    write: tuple[str, Mapping[str, Any]]
    read: tuple[str, Mapping[str, Any]]
    remedy: str
    remove: tuple[str, Mapping[str, Any]] | None = None


_ENTITY = {"name": MARK, "entityType": "check", "observations": ["written by mtrl-gateway check"]}
KNOWN_SERVERS = (
    KnownServer(
        write=("create_entities", {"entities": [_ENTITY]}),
        read=("read_graph", {}),
        remove=("delete_entities", {"entityNames": [MARK]}),
        remedy='add `"env": {"MEMORY_FILE_PATH": "${MTRL_ROLLOUT_DIR}/memory.jsonl"}`',
    ),
    KnownServer(
        write=("create_table", {"query": f"CREATE TABLE {MARK} (id INTEGER)"}),
        read=("list_tables", {}),
        remove=("write_query", {"query": f"DROP TABLE {MARK}"}),
        remedy='write `"--db-path", "${MTRL_ROLLOUT_DIR}/data.db"` in its `args`',
    ),
)
GENERAL_REMEDY = "let it write to `${MTRL_ROLLOUT_DIR}`: name that in its `args`, `env` or `cwd`"


@dataclass(frozen=True)
class IsolationResult:
    """What was tried, and what the sessions share."""

    tried: str
    shared: str = ""
    """What they share; empty if nothing was found."""
    remedy: str = field(default=GENERAL_REMEDY)


async def check_isolation(server: McpToolset) -> IsolationResult | None:
    """Opens two sessions and tries them; None for servers that share their connection, or are not processes."""
    if server.is_shared or server.config.command is None or server.config.most < 2:
        return None
    names = {spec.name for spec in server.specs}
    known = next((kind for kind in KNOWN_SERVERS if {kind.write[0], kind.read[0]} <= names), None)
    try:
        with anyio.move_on_after(CHECK_S):
            return await (_compare_files(server) if known is None else _write_and_read(server, known))
    except UpstreamError as error:
        return IsolationResult(f"nothing was tried: {error.reason}")
    return IsolationResult(f"nothing was tried: no answer within {CHECK_S:g} s")


async def _compare_files(server: McpToolset) -> IsolationResult:
    """Starts two processes and calls no tool: an unknown one might do harm."""
    connections = [await server.pool.acquire(RolloutIdentity(f"check-{number}", 0)) for number in (1, 2)]
    try:
        children = (connection.transport.child for connection in connections)
        first, second = (set() if child is None else _files_open_for_writing(child.pid or 0) for child in children)
    finally:
        for connection in connections:
            server.pool.release(connection)
    tried = "no tools are known to try it with, so the files that two processes have open for writing were compared"
    both = sorted(first & second)
    return IsolationResult(tried, f"two processes have {both[0]} open for writing" if both else "")


async def _write_and_read(server: McpToolset, known: KnownServer) -> IsolationResult:
    async with server.open(Task(rollout="check-1")) as first, server.open(Task(rollout="check-2")) as second:
        return await _try_sessions(known, first, second)


async def _try_sessions(known: KnownServer, first: Session, second: Session) -> IsolationResult:
    mark = f"mtrl_check_{token_hex(4)}"
    written = await _call(first, known.write, mark)
    tried = f"one session wrote with {known.write[0]}, another read with {known.read[0]}"
    if written.outcome is not Outcome.OK:
        return IsolationResult(f"nothing was tried: {known.write[0]} failed: {written.reason or written.text}")
    try:
        seen = mark in (await _call(second, known.read, mark)).text
    finally:
        if known.remove is not None:
            await _call(first, known.remove, mark)
    return IsolationResult(tried, f"{tried} and saw it" if seen else "", known.remedy)


async def _call(session: Session, call: tuple[str, Mapping[str, Any]], mark: str) -> ToolResult:
    return await session.call(ToolCall("check", call[0], json.dumps(call[1]).replace(MARK, mark)))


def _files_open_for_writing(pid: int) -> set[str]:
    """Regular files that a process may write to, as far as this system shows them."""
    files = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError, ValueError, IndexError):
                target = os.readlink(descriptor)
                info = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text()
                flags = int(info.partition("flags:")[2].split()[0], 8)
                if flags & (os.O_WRONLY | os.O_RDWR) and Path(target).is_file():
                    files.add(target)
    return files
