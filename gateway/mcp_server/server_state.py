"""The state of the MCP server: its clients' sessions, calls that wait for input, and notifications.

Each client's sessions are its own and last as long as its connection.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.server.subscriptions import ListenHandler
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import X_MCP_HEADER_KEY
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, LoggingLevel

from gateway.errors import GatewayError, SessionError
from gateway.gateway import Gateway
from gateway.mcp_client.decode import META_PREFIX
from gateway.mcp_client.mcp_toolset import mcp_servers
from gateway.mcp_server.call_tasks import has_tasks, name_client
from gateway.mcp_server.client_context import (
    DEFAULT_LEVEL,
    RequestContext,
    build_context,
    get_connection,
    is_modern,
)
from gateway.mcp_server.notifications import NotificationHub
from gateway.mcp_server.resources import ResourceCatalog
from gateway.mcp_server.resumable_calls import Handler, ResumableCalls
from gateway.server_start import describe_starting
from gateway.session import CANCELLED, CallScope, GatewaySession
from gateway.types import Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec


def join_instructions(gateway: Gateway) -> str | None:
    """What the gateway's MCP servers say about themselves: one's own words, or each under its name."""
    servers = mcp_servers(gateway.sources)
    texts = [(server.name, server.instructions.strip()) for server in servers if server.instructions]
    if len(texts) < 2:
        return texts[0][1] if texts else None
    return "\n\n".join(f"# {name}\n{text}" for name, text in texts)


class OfferedTools:
    """The tools that clients may call now."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._specs: Sequence[ToolSpec] = ()
        self._by_name: Mapping[str, ToolSpec] = {}
        self._searched: Mapping[str, ToolSpec] = {}
        self._without_header_arguments: frozenset[str] = frozenset()

    @property
    def without_header_arguments(self) -> frozenset[str]:
        """Names of the tools without arguments that a client must repeat in headers."""
        by_name = self.by_name
        if by_name is not self._searched:
            names = (name for name, spec in by_name.items() if X_MCP_HEADER_KEY not in json.dumps(spec.parameters))
            self._searched, self._without_header_arguments = by_name, frozenset(names)
        return self._without_header_arguments

    @property
    def by_name(self) -> Mapping[str, ToolSpec]:
        """The specs by name, cached: a gateway's `specs` is the same object until the list changes."""
        specs = self._gateway.specs
        if specs is not self._specs:
            self._specs, self._by_name = specs, {spec.name: spec for spec in specs if spec.audience == "policy"}
        return self._by_name


class ClientSessions:
    """The sessions of one client: one for all tools, opened at the first call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._by_tool: dict[str, GatewaySession] = {}
        self._lock = anyio.Lock()
        self._session_per_tool = False

    async def get_session(self, name: str) -> GatewaySession:
        """The open session that serves a tool, opened if necessary."""
        async with self._lock:
            if not self.has_open(name):
                await self._open_session(name)
            return self._by_tool[name]

    def has_open(self, name: str) -> bool:
        """Whether an open session serves the tool; it stays callable even if it is no longer listed."""
        session = self._by_tool.get(name)
        return session is not None and not session.closed

    async def _open_session(self, name: str) -> None:
        """Opens one session for all tools, or a separate one for a tool that was added later.

        If the tools cannot be opened together (one may need arguments that no MCP client gives), each gets its own.
        """
        if not self._session_per_tool and not any(not session.closed for session in self._by_tool.values()):
            try:
                session = await self._gateway.begin(Task())
            except SessionError:
                self._session_per_tool = True
            else:
                self._by_tool.update({spec.name: session for spec in session.specs})
        if not self.has_open(name):
            self._by_tool[name] = await self._gateway.begin(Task(tools=(name,)))

    async def close(self) -> None:
        """Closes all sessions."""
        sessions = {id(session): session for session in self._by_tool.values()}
        async with anyio.create_task_group() as closing:
            for session in sessions.values():
                closing.start_soon(session.close)


SESSION_META_KEY = f"{META_PREFIX}session"
"""Key in a request's `_meta`: the id of a session that its sender opened, over MCP or HTTP."""
_SESSIONS_STATE = f"{META_PREFIX}sessions"
CLOSE_S = 5.0


class McpServerState:
    """What all requests to one MCP server share."""

    def __init__(self, gateway: Gateway, resumable_calls: ResumableCalls, sessions: ClientSessions | None) -> None:
        self.gateway, self.resumable_calls = gateway, resumable_calls
        self.sessions = sessions
        """The sessions of the only client, if there can be only one."""
        self.tools = OfferedTools(gateway)
        self.catalog = ResourceCatalog(gateway)
        self.notifications = NotificationHub(gateway, self.catalog)
        self.listen_handler = ListenHandler(self.notifications.bus)
        self.log_level: LoggingLevel = DEFAULT_LEVEL
        """The most verbose level that a client has set."""

    async def call_tool(
        self,
        call: ToolCall,
        context: Context,
        meta: Mapping[str, Any],
        sessions: ClientSessions | None,
        scope: CallScope | None = None,
    ) -> ToolResult:
        """Calls a tool in the session that the request's `meta` names, in its client's, or in a new one for this call.

        With `scope` the caller can cancel it.
        """
        name, session_id = call.name, meta.get(SESSION_META_KEY)
        if (late := await self.wait_for_tool(name)) is not None:
            return late
        try:
            if session_id is not None:
                return await self._find_session(session_id, name).call(call, context, scope)
            if sessions is not None:
                _require_tool(name, name in self.tools.by_name or sessions.has_open(name))
                return await (await sessions.get_session(name)).call(call, context, scope)
            _require_tool(name, name in self.tools.by_name)
            # Modern HTTP requests belong to no connection, so nothing is kept between them.
            result = CANCELLED
            with (scope or CallScope()).open():
                session = await self.gateway.begin(Task(tools=(name,)))
                try:
                    result = await session.call(call, context)
                finally:
                    await session.close()
            return result
        except GatewayError as error:
            raise MCPError(INTERNAL_ERROR, str(error)) from error

    async def wait_for_tool(self, name: str) -> ToolResult | None:
        """Waits for a tool that a starting server may have; returns a result that says so if it takes too long."""
        start = self.gateway.start
        if not start.names:
            return None
        await start.wait_for_tools(lambda: name in self.tools.by_name)
        if not start.names or name in self.tools.by_name:
            return None
        reason = describe_starting(start.names)
        return ToolResult((Text(f"The tool {name!r} is not available: {reason}."),), Outcome.UNAVAILABLE, reason=reason)

    def _find_session(self, session_id: Any, name: str) -> GatewaySession:
        session = self.gateway.sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise MCPError(INVALID_PARAMS, f"`{SESSION_META_KEY}` names no open session")
        _require_tool(name, any(spec.name == name for spec in session.specs))
        return session

    def client_sessions(self, request: RequestContext) -> ClientSessions | None:
        """The sessions of the client behind a request; None if nothing is kept between its requests."""
        if self.sessions is not None or is_modern(request):
            return self.sessions
        client = get_connection(request)
        sessions: ClientSessions | None = client.state.get(_SESSIONS_STATE)
        if sessions is None:
            client.state[_SESSIONS_STATE] = sessions = ClientSessions(self.gateway)
            client.exit_stack.push_async_callback(sessions.close)
        return sessions

    async def run_request(self, request: RequestContext, handler: Handler) -> object:
        """Runs a handler with its client's context, resumably if a modern client may be asked for input or poll."""
        context = build_context(request, is_only_client=self.sessions is not None)
        params = dict(request.params or {})
        poller = name_client(request) if request.method == "tools/call" and has_tasks(context.meta) else None
        if is_modern(request) and (
            context.answer_request is not None or "requestState" in params or poller is not None
        ):
            return await self.resumable_calls.start_or_resume(params, context, handler, poller)
        return await handler(context)


def _require_tool(name: str, is_offered: bool) -> None:
    if not is_offered:
        raise MCPError(INVALID_PARAMS, f"Unknown tool: {name}")


@asynccontextmanager
async def open_server_state(gateway: Gateway, *, single_client: bool) -> AsyncIterator[McpServerState]:
    """The server's state for the length of a block; notifications are forwarded meanwhile."""
    sessions = ClientSessions(gateway) if single_client else None
    try:
        async with anyio.create_task_group() as tasks:
            state = McpServerState(gateway, ResumableCalls(tasks), sessions)
            async with state.notifications.running():
                yield state
            state.listen_handler.close()
            tasks.cancel_scope.cancel()
    finally:
        if sessions is not None:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await sessions.close()
