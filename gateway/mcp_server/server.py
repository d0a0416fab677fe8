"""The gateway as an MCP server: request handlers, declared capabilities and paging, for all protocol versions.

Capabilities are declared only if a connected server has them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, get_args

import anyio
import mcp_types as mcp
from mcp.server import NotificationOptions, Server
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from gateway.gateway import Gateway
from gateway.large_json import measure, run_beside
from gateway.mcp_client.decode import upstream_meta
from gateway.mcp_client.errors import JSONRPC_ERROR
from gateway.mcp_client.tasks import TASKS_EXTENSION
from gateway.mcp_server.call_tasks import TaskParams, UpdateTaskParams, cancel_task, get_task, update_task
from gateway.mcp_server.client_context import (
    LOG_LEVEL_STATE,
    RequestContext,
    build_context,
    get_connection,
    get_meta,
    is_modern,
)
from gateway.mcp_server.encode import to_call_result, to_tool
from gateway.mcp_server.resources import ResourceCatalog, request_upstream
from gateway.mcp_server.resumable_calls import without_envelope
from gateway.mcp_server.server_state import (
    CLOSE_S,
    McpServerState,
    OfferedTools,
    join_instructions,
    open_server_state,
)
from gateway.types import Context, ToolCall, ToolResult, ToolSpec
from gateway.version import installed_version
from gateway.wire import is_large_answer

log = logging.getLogger(__name__)

PAGE_SIZE = 500
PAGE_BYTES = 1_048_576
COMPLETE_RESULT: Mapping[str, Any] = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""The fields that results need since 2026; they are dropped when serialized for older versions."""


def build_page(method: str, version: str, key: str, items: Sequence[dict[str, Any]], cursor: Any) -> dict[str, Any]:
    """One page of a list result; items that the client's protocol version cannot express are left out."""
    start = _parse_cursor(cursor)
    page = {**COMPLETE_RESULT, key: list(items[start : start + PAGE_SIZE])}
    if not _is_serializable(method, version, page):
        valid = [item for item in page[key] if _is_serializable(method, version, {**COMPLETE_RESULT, key: [item]})]
        log.warning(
            "%s: %d items are left out, because MCP %s cannot express them",
            method,
            len(page[key]) - len(valid),
            version,
        )
        page[key] = valid
    return {**page, "nextCursor": str(start + PAGE_SIZE)} if start + PAGE_SIZE < len(items) else page


def _parse_cursor(cursor: Any) -> int:
    if cursor is None:
        return 0
    if not (isinstance(cursor, str) and cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        raise MCPError(INVALID_PARAMS, "Unknown cursor")
    return int(cursor)


def _is_serializable(method: str, version: str, result: Mapping[str, Any]) -> bool:
    try:
        serialize_server_result(method, version, result)
    except ValidationError:
        return False
    return True


Result = dict[str, Any]
_LOG_LEVELS = get_args(mcp.LoggingLevel)


class GatewayMcpServer(Server[McpServerState]):
    """The MCP server. `single_client`: all requests come from one client (stdio), else from many (HTTP)."""

    state: McpServerState
    """What all requests share, while it runs."""

    def __init__(self, gateway: Gateway, *, single_client: bool) -> None:
        super().__init__(
            "mtrl-gateway",
            version=installed_version(),
            lifespan=lambda _: self._open_state(gateway, single_client=single_client),
            get_tool_input_schema=self._get_input_schema,
        )
        self._catalog, self._tools = ResourceCatalog(gateway), OfferedTools(gateway)
        self._gateway = gateway
        page_params, notification_params = mcp.PaginatedRequestParams, mcp.NotificationParams
        self.add_request_handler("tools/list", page_params, _list_tools)
        self.add_request_handler("tools/call", mcp.CallToolRequestParams, _call_tool)
        for method in _CATALOG_LISTS:
            self.add_request_handler(method, page_params, partial(_list_items, method))
        self.add_request_handler("resources/read", mcp.ReadResourceRequestParams, _get_item)
        self.add_request_handler("resources/subscribe", mcp.SubscribeRequestParams, _subscribe)
        self.add_request_handler("resources/unsubscribe", mcp.UnsubscribeRequestParams, _unsubscribe)
        self.add_request_handler("prompts/get", mcp.GetPromptRequestParams, _get_item)
        self.add_request_handler("completion/complete", mcp.CompleteRequestParams, _complete)
        self.add_request_handler("logging/setLevel", mcp.SetLevelRequestParams, _set_level)
        self.add_request_handler("subscriptions/listen", mcp.SubscriptionsListenRequestParams, _listen)
        self.add_request_handler("tasks/get", TaskParams, get_task)
        self.add_request_handler("tasks/update", UpdateTaskParams, update_task)
        self.add_request_handler("tasks/cancel", TaskParams, cancel_task)
        self.add_notification_handler("notifications/initialized", notification_params, _on_initialized)

    @asynccontextmanager
    async def _open_state(self, gateway: Gateway, *, single_client: bool) -> AsyncIterator[McpServerState]:
        async with open_server_state(gateway, single_client=single_client) as state:
            self.state = state
            yield state

    def _get_input_schema(self, name: str) -> Mapping[str, Any] | None:
        """The schema by which the SDK compares arguments with the headers that repeat them."""
        spec = self._tools.by_name.get(name)
        return None if spec is None else spec.parameters

    @property
    def instructions(self) -> str | None:
        """What the connected servers say about themselves, each under its name if there are several."""
        return join_instructions(self._gateway)

    @instructions.setter
    def instructions(self, value: str | None) -> None:
        """The SDK's constructor sets it; the servers' own are used."""

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> mcp.ServerCapabilities:
        """The capabilities that the connected servers have now; all while a server is starting that may have them."""
        has = self._catalog.declare
        return mcp.ServerCapabilities(
            tools=mcp.ToolsCapability(list_changed=True),
            resources=mcp.ResourcesCapability(subscribe=True, list_changed=True) if has("resources") else None,
            prompts=mcp.PromptsCapability(list_changed=True) if has("prompts") else None,
            completions=mcp.CompletionsCapability() if has("completions") else None,
            logging=mcp.LoggingCapability() if has("logging") else None,
            extensions={TASKS_EXTENSION: {}} if protocol_version in MODERN_PROTOCOL_VERSIONS else None,
        )


async def _list_tools(request: RequestContext, params: mcp.PaginatedRequestParams) -> Result:
    await request.lifespan_context.gateway.start.settle()
    specs = list(request.lifespan_context.tools.by_name.values())
    start = _parse_cursor(params.cursor)
    end = start + _count_page(specs[start : start + PAGE_SIZE])
    tools = [to_tool(spec, modern=is_modern(request)) for spec in specs[start:end]]
    page = build_page("tools/list", request.protocol_version, "tools", tools, None)
    return {**page, "nextCursor": str(end)} if end < len(specs) else page


def _count_page(specs: Sequence[ToolSpec]) -> int:
    """How many of the tools fit into one page, at least one: a page is encoded at once."""
    size = 0
    for count, spec in enumerate(specs):
        size += measure((spec.description, spec.parameters, spec.output), PAGE_BYTES)
        if size > PAGE_BYTES:
            return max(1, count)
    return len(specs)


async def _call_tool(request: RequestContext, params: mcp.CallToolRequestParams) -> Any:
    state: McpServerState = request.lifespan_context
    call = ToolCall(str(request.request_id), params.name, json.dumps(params.arguments or {}))

    async def handle(context: Context) -> Result:
        result = await state.call_tool(call, context, get_meta(request), state.client_sessions(request))
        encode = partial(encode_result, result, modern=is_modern(request))
        return await run_beside(encode) if is_large_answer(result) else encode()

    return await state.run_request(request, handle)


def encode_result(result: ToolResult, *, modern: bool) -> Result:
    """The result for the client; raises again the JSON-RPC error of an upstream server."""
    protocol_error = result.meta.get(JSONRPC_ERROR)
    if isinstance(protocol_error, Mapping):
        raise MCPError(int(protocol_error["code"]), result.reason or "", protocol_error.get("data"))
    return to_call_result(result, modern=modern)


_CATALOG_LISTS = {
    "resources/list": ("resources", ResourceCatalog.list_resources),
    "resources/templates/list": ("resourceTemplates", ResourceCatalog.list_templates),
    "prompts/list": ("prompts", ResourceCatalog.list_prompts),
}
"""What the servers have beside their tools: by method, the key of the items, and what lists them."""


async def _list_items(method: str, request: RequestContext, params: mcp.PaginatedRequestParams) -> Result:
    key, list_all = _CATALOG_LISTS[method]
    items = await list_all(request.lifespan_context.catalog)
    return build_page(method, request.protocol_version, key, items, params.cursor)


async def _get_item(request: RequestContext, _: mcp.ReadResourceRequestParams | mcp.GetPromptRequestParams) -> Any:
    state: McpServerState = request.lifespan_context
    get = state.catalog.read_resource if request.method == "resources/read" else state.catalog.get_prompt

    async def handle(context: Context) -> Result:
        return _pass_through(await get(_request_params(request), context))

    return await state.run_request(request, handle)


async def _complete(request: RequestContext, _: mcp.CompleteRequestParams) -> Result:
    return _pass_through(
        await request.lifespan_context.catalog.complete(_request_params(request), build_context(request))
    )


def _request_params(request: RequestContext) -> Result:
    return without_envelope(request.params or {})


def _pass_through(result: Result) -> Result:
    meta = result.get("_meta")
    return {**COMPLETE_RESULT, **result, "_meta": upstream_meta(meta) if isinstance(meta, Mapping) else {}}


async def _subscribe(request: RequestContext, params: mcp.SubscribeRequestParams) -> Result:
    request.lifespan_context.catalog.require_capability("resources", "resources/subscribe")
    await request.lifespan_context.notifications.subscribe(get_connection(request), str(params.uri))
    return {}


async def _unsubscribe(request: RequestContext, params: mcp.UnsubscribeRequestParams) -> Result:
    await request.lifespan_context.notifications.unsubscribe(get_connection(request), str(params.uri))
    return {}


async def _set_level(request: RequestContext, params: mcp.SetLevelRequestParams) -> Result:
    """Sets one client's log level; upstream servers, which clients share, get the most verbose level of all."""
    state: McpServerState = request.lifespan_context
    get_connection(request).state[LOG_LEVEL_STATE] = params.level
    if _LOG_LEVELS.index(params.level) < _LOG_LEVELS.index(state.log_level):
        state.log_level = params.level
        for server in state.catalog.servers_with("logging"):
            await request_upstream(server, "logging/setLevel", {"level": state.log_level}, Context())
    return {}


async def _listen(request: RequestContext, params: mcp.SubscriptionsListenRequestParams) -> Any:
    state: McpServerState = request.lifespan_context
    uris: list[str] = []
    try:
        for uri in params.notifications.resource_subscriptions or ():
            uris.append(uri)
            await state.notifications.follow(uri)
        return await state.listen_handler(request, params)
    finally:
        with anyio.move_on_after(CLOSE_S, shield=True):
            for uri in uris:
                await state.notifications.unfollow(uri)


async def _on_initialized(request: RequestContext, _: mcp.NotificationParams) -> None:
    request.lifespan_context.notifications.add_client(get_connection(request))
