"""One rollout's session on an MCP server: sends tool calls, and turns answers and failures into results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import anyio

from gateway.config.rollout_variables import needs_folder
from gateway.errors import Unavailable
from gateway.mcp_client.catalog_tools import call_catalog_tool
from gateway.mcp_client.connection import Connection
from gateway.mcp_client.decode import is_heavy, to_result
from gateway.mcp_client.errors import JSONRPC_ERROR, UpstreamError, ended_by_policy
from gateway.mcp_client.parse_hook import MCPBaseTool, apply_parser
from gateway.mcp_client.pool import unavailable_error
from gateway.mcp_client.rollout_folder import RolloutIdentity, to_policy, to_server
from gateway.mcp_client.server_requests import with_answers
from gateway.native.base import OpenAIFunctionToolSchema
from gateway.native.thread_pool import ThreadPool
from gateway.sandbox.network_refusals import add_refusals
from gateway.schema import parse_arguments
from gateway.state.prepared_state import PreparedStates
from gateway.toolset import unknown_tool_result
from gateway.types import (
    DEFAULT_CONTEXT,
    EMPTY,
    Context,
    Outcome,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    with_times,
)

if TYPE_CHECKING:
    from gateway.mcp_client.mcp_toolset import McpToolset

ResultParser = MCPBaseTool | Callable[..., MCPBaseTool]
"""A parser for the results of any tool, or a factory that builds one from a tool's schema."""

_POLICY_MESSAGES = {
    Outcome.UNAVAILABLE: "The tool cannot be reached at the moment; nothing was done.",
    Outcome.UNKNOWN: "The connection to the tool was lost while it worked; it may or may not have done it.",
}

_STATE_LOST = Text("[The server of this tool was restarted since you last used it. What it remembered may be lost.]")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
PARSE_TIMEOUT_S = 10.0
"""Deadline of a parser; the tool's own deadline applies as well."""
MAX_PARSE_THREADS = 32
"""Threads of one server's parsers; one that never returns keeps its thread."""


class ResultParsers:
    """The result parsers of a server's tools by tool name; `*` stands for every other tool."""

    def __init__(self, configured: Mapping[str, ResultParser]) -> None:
        self._configured = configured
        self._built: dict[str, MCPBaseTool | None] = {}
        self._threads = ThreadPool(MAX_PARSE_THREADS)

    async def parse(self, spec: ToolSpec, raw: Mapping[str, Any]) -> ToolResult:
        """The result for a raw one, after the tool's parser; a parser runs in a thread, with a deadline."""
        result = await self._threads.run(to_result, raw) if is_heavy(raw) else to_result(raw)
        if (parser := self._find_parser(spec)) is None:
            return result
        with anyio.move_on_after(PARSE_TIMEOUT_S):
            parsed: ToolResult = await self._threads.run(apply_parser, parser, raw.get("content"), result)
            return parsed
        reason = f"{type(parser).__name__} did not parse the result within {PARSE_TIMEOUT_S:g} s"
        return replace(result, metrics={**result.metrics, "parse_failed": 1}, reason=result.reason or reason)

    def _find_parser(self, spec: ToolSpec) -> MCPBaseTool | None:
        if not self._configured:
            return None
        if spec.name not in self._built:
            parser = self._configured.get(spec.name, self._configured.get("*"))
            if isinstance(parser, type):
                parser = partial(parser, {})
            if parser is not None and not isinstance(parser, MCPBaseTool):
                function = {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
                parser = parser(OpenAIFunctionToolSchema.model_validate({"function": function}))
            self._built[spec.name] = parser
        return self._built[spec.name]


class McpSession:
    """One rollout's session. A leased connection is taken at the first call and kept.

    If that connection is lost, later calls fail: continuing on a new one would silently lose the server's state.
    A shared server is meant to have no state, so calls go on after its restart, but a session that had used it is told.
    """

    __slots__ = ("_closed", "_connection", "_lock", "_rollout", "_toolset", "_used")

    def __init__(self, toolset: McpToolset, rollout: RolloutIdentity) -> None:
        self._toolset, self._rollout = toolset, rollout
        self._connection: Connection | None = None
        self._used: Connection | None = None
        """The shared connection that answered this session last."""
        self._lock: anyio.Lock | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    @property
    def _states(self) -> PreparedStates | None:
        """Those that its processes begin from, where each has a folder."""
        return self._toolset.prepared_states if needs_folder(self._toolset.config) else None

    async def finish(self) -> Mapping[str, float]:
        return {}

    async def hash_state(self) -> str | None:
        """The hash of the folder of this rollout's process; as it was prepared if no process was started."""
        if (states := self._states) is None:
            return None
        if self._connection is None:
            return await states.hash_prepared(self._rollout.state)
        folder, reason = self._connection.transport.folder, self._connection.close_reason
        if reason is not None and reason.policy_doing:
            return f"ended: {reason.policy_doing}"  # No state has this hash.
        if folder is None or reason is not None:
            raise Unavailable(f"the state at the end was lost: {reason}")
        return await states.hash_folder(folder)

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        spec = self._toolset.listing.by_name.get(call.name)
        if spec is None:
            return unknown_tool_result(call.name, self.specs)
        arguments = _check_arguments(call.arguments)
        if isinstance(arguments, str):
            return ToolResult((Text(arguments),), Outcome.INVALID, reason="unusable arguments")
        started = connected = perf_counter()
        folder = None
        try:
            connection = await self._get_connection()
            connected = perf_counter()
            if (folder := connection.transport.folder) is not None:
                arguments = to_server(arguments, folder)
            context = with_answers(context, self._toolset.answers)
            if (method := self._toolset.listing.catalog.get(call.name)) is not None:
                raw = await call_catalog_tool(connection, method, arguments, context)
            else:
                raw = await connection.request("tools/call", {"name": call.name, "arguments": arguments}, context)
            raw = to_policy(raw, folder)
        except UpstreamError as error:
            error.reason = to_policy(error.reason, folder)
            return _failed_result(error, {"connect": connected - started, "upstream": perf_counter() - connected})
        answered = perf_counter()
        result = await self._toolset.result_parsers.parse(spec, raw)
        timing = {
            "connect": connected - started,
            "upstream": answered - connected,
            "parse": perf_counter() - answered,
        }
        before, self._used = self._used, connection
        if self._toolset.is_shared and before is not None and before is not connection and _keeps_state(connection):
            result = replace(result, parts=(*result.parts, _STATE_LOST), metrics={**result.metrics, "state_lost": 1})
        if (sandbox := connection.transport.sandbox) is not None:
            result = add_refusals(result, sandbox.take_refusals())
        return with_times(result, timing)

    async def _get_connection(self) -> Connection:
        connection = await (
            self._toolset.pool.acquire(self._rollout) if self._toolset.is_shared else self._get_leased_connection()
        )
        connection.protocol.header_maps = self._toolset.listing.header_maps
        return connection

    async def _get_leased_connection(self) -> Connection:
        if self._connection is None:
            self._lock = self._lock or anyio.Lock()
            async with self._lock:
                if self._connection is None:
                    self._connection = await self._toolset.pool.acquire(self._rollout)
        if self._closed:
            # The session closed while it waited for the connection, so only this call can release it.
            self.close()
        if self._connection.close_reason is not None:
            if self._connection.close_reason.policy_doing:
                raise ended_by_policy(self._connection.close_reason)
            raise unavailable_error(f"the session's state was lost: {self._connection.close_reason}")
        return self._connection

    def close(self) -> None:
        """Closes a leased connection: the state that the session left in it belongs to this session alone."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()


def _keeps_state(connection: Connection) -> bool:
    """Whether the server may remember something of a connection; over HTTP, modern versions have no sessions."""
    return connection.transport.name == "stdio" or not connection.protocol.is_modern


def _check_arguments(text: str) -> dict[str, Any] | str:
    """The arguments, or what is wrong with them: text that JSON cannot carry would break a shared connection."""
    try:
        arguments = parse_arguments(text)
        _ENCODER.encode(arguments).encode()
    except UnicodeEncodeError:
        return "The arguments contain half of a character (a lone surrogate). Write whole characters."
    except (ValueError, RecursionError) as error:
        return f"The arguments are not valid JSON ({error}). Write one JSON object."
    return arguments if isinstance(arguments, dict) else "The arguments must be one JSON object."


def _failed_result(error: UpstreamError, timing: Mapping[str, float]) -> ToolResult:
    text = error.policy_text or _POLICY_MESSAGES.get(error.outcome, error.reason)
    meta = {JSONRPC_ERROR: {"code": error.code, "data": error.data}} if error.is_protocol_error else EMPTY
    return ToolResult((Text(text),), error.outcome, reason=error.reason, timing=timing, meta=meta)
