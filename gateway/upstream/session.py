"""One rollout's hold on one server: a call goes out as it was written, and every ending is an outcome."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio
from mcp_types import INTERNAL_ERROR

from gateway.native.base import OpenAIFunctionToolSchema
from gateway.toolset import missing
from gateway.types import ALONE, EMPTY, Context, Outcome, Text, ToolCall, ToolResult, ToolSpec
from gateway.upstream.connection import Connection
from gateway.upstream.fault import JSONRPC_ERROR, UpstreamError
from gateway.upstream.hook import MCPBaseTool, parsed
from gateway.upstream.parts import to_result
from gateway.upstream.pool import unavailable

if TYPE_CHECKING:
    from gateway.upstream.server import McpToolset

Reading = MCPBaseTool | Callable[..., MCPBaseTool]
"""An object that reads the results of any tool, or what makes one for a tool from its schema."""

_WORDS = {
    Outcome.UNAVAILABLE: "The tool cannot be reached at the moment; nothing was done.",
    Outcome.UNKNOWN: "The connection to the tool was lost while it worked; it may or may not have done it.",
}


class Readings:
    """Which class reads the results of which tool."""

    def __init__(self, given: Mapping[str, Reading]) -> None:
        self._given = given
        self._made: dict[str, MCPBaseTool | None] = {}

    def of(self, spec: ToolSpec) -> MCPBaseTool | None:
        if not self._given:
            return None
        if spec.name not in self._made:
            given = self._given.get(spec.name, self._given.get("*"))
            if isinstance(given, type):
                given = partial(given, {})
            made = given(_schema(spec)) if given is not None and not isinstance(given, MCPBaseTool) else given
            self._made[spec.name] = made
        return self._made[spec.name]


def _schema(spec: ToolSpec) -> OpenAIFunctionToolSchema:
    function = {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
    return OpenAIFunctionToolSchema.model_validate({"function": function})


class UpstreamSession:
    """Takes its connection at the first call and keeps it: state that is lost is never silently fresh state."""

    __slots__ = ("_closed", "_connection", "_server", "_turn")

    def __init__(self, server: McpToolset) -> None:
        self._server = server
        self._connection: Connection | None = None
        self._turn: anyio.Lock | None = None
        self._closed = False

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._server.specs

    async def finish(self) -> Mapping[str, float]:
        return {}

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        server = self._server
        spec = server.listing.by_name.get(call.name)
        if spec is None:
            return missing(call.name, server.specs)
        arguments = _arguments(call.arguments)
        if isinstance(arguments, str):
            return ToolResult((Text(arguments),), Outcome.INVALID, reason="unusable arguments")
        began = connected = perf_counter()
        try:
            connection = await self._reached()
            connected = perf_counter()
            raw = await connection.request("tools/call", {"name": call.name, "arguments": arguments}, context)
        except UpstreamError as error:
            return _failed(error, {"connect": connected - began, "upstream": perf_counter() - connected})
        answered = perf_counter()
        result = to_result(raw)
        if (reading := server.readings.of(spec)) is not None:
            result = parsed(reading, raw.get("content"), result)
        timing = {
            "connect": connected - began,
            "upstream": answered - connected,
            "parse": perf_counter() - answered,
        }
        return replace(result, timing=timing)

    async def _reached(self) -> Connection:
        connection = await self._server.supply.take() if self._server.shared else await self._leased()
        connection.era.header_maps = self._server.listing.header_maps
        return connection

    async def _leased(self) -> Connection:
        if self._connection is None:
            self._turn = self._turn or anyio.Lock()
            async with self._turn:
                if self._connection is None:
                    self._connection = await self._server.supply.take()
        if self._closed:
            # It came too late for the rollout, and nobody else would give it back.
            self.close()
        if self._connection.ending is not None:
            raise unavailable(f"the session's state was lost: {self._connection.ending}")
        return self._connection

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._server.supply.give_back(self._connection)


def _arguments(text: str) -> dict[str, Any] | str:
    """The arguments, or what is wrong with them: what JSON cannot carry would break the connection of all."""
    try:
        arguments = json.loads(text or "{}")
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "The arguments hold half of a character (a lone surrogate). Write whole characters."
    except (ValueError, RecursionError) as error:
        return f"The arguments are not valid JSON ({error}). Write one JSON object."
    return arguments if isinstance(arguments, dict) else "The arguments must be one JSON object."


def _failed(error: UpstreamError, timing: Mapping[str, float]) -> ToolResult:
    words = _WORDS.get(error.outcome, error.reason)
    meta = EMPTY if error.code == INTERNAL_ERROR else {JSONRPC_ERROR: {"code": error.code, "data": error.data}}
    return ToolResult((Text(words),), error.outcome, reason=error.reason, timing=timing, meta=meta)
