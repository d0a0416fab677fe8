"""Tries whether the sessions of an isolated stdio server share files: one session writes, another reads.

It can be tried with servers whose tools are known; an unknown tool might do harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import anyio

from gateway.finding import Finding
from gateway.mcp_client.errors import UpstreamError
from gateway.mcp_client.mcp_toolset import McpToolset
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


async def check_isolation(server: McpToolset) -> Finding | None:
    """Opens two sessions and tries them; None for servers that are not known, share their connection, or are no
    processes."""
    names = {spec.name for spec in server.specs}
    known = next((kind for kind in KNOWN_SERVERS if {kind.write[0], kind.read[0]} <= names), None)
    if known is None or server.is_shared or server.config.command is None or server.config.most < 2:
        return None
    untried = f"no answer within {CHECK_S:g} s"
    try:
        with anyio.move_on_after(CHECK_S):
            async with server.open(Task(rollout="check-1")) as first, server.open(Task(rollout="check-2")) as second:
                return await _try_sessions(server, known, first, second)
    except UpstreamError as error:
        untried = error.reason
    return Finding("note", f"server {server.name}: whether sessions share files was not tried: {untried}")


async def _try_sessions(server: McpToolset, known: KnownServer, first: Session, second: Session) -> Finding:
    mark = f"mtrl_check_{token_hex(4)}"
    written = await _call(first, known.write, mark)
    tried = f"one session wrote with {known.write[0]}, another read with {known.read[0]}"
    if written.outcome is not Outcome.OK:
        raise UpstreamError(written.outcome, f"{known.write[0]} failed: {written.reason or written.text}")
    try:
        is_seen = mark in (await _call(second, known.read, mark)).text
    finally:
        if known.remove is not None:
            await _call(first, known.remove, mark)
    if is_seen:
        problem = f"server {server.name}: `isolation: {server.config.isolation}` shares files: {tried} and saw it"
        return Finding("wrong", problem, known.remedy)
    return Finding("ok", f"server {server.name}: no shared files were found: {tried}")


async def _call(session: Session, call: tuple[str, Mapping[str, Any]], mark: str) -> ToolResult:
    return await session.call(ToolCall("check", call[0], json.dumps(call[1]).replace(MARK, mark)))
