"""The gateway as an MCP server: both eras are spoken, and nothing is promised that nobody behind it can do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, get_args

import anyio
import mcp_types as mcp
from mcp.server import NotificationOptions, Server
from mcp.shared.exceptions import MCPError

from gateway.front.behind import LEVEL, Asked, behind, connection, modern
from gateway.front.page import COMPLETE, page
from gateway.front.parts import foreign, to_answer, to_tool
from gateway.front.room import CLOSE_S, Room, room
from gateway.front.shelf import Shelf, ask
from gateway.front.visit import Offer
from gateway.gateway import Gateway
from gateway.types import Context, ToolCall, ToolResult
from gateway.upstream.fault import JSONRPC_ERROR

Answer = dict[str, Any]
_LEVELS = get_args(mcp.LoggingLevel)


class Front(Server[Room]):
    """`one_client`: its connection is all there is, as over stdio; else strangers share the server, as over HTTP."""

    def __init__(self, gateway: Gateway, *, one_client: bool) -> None:
        super().__init__(
            "mtrl-gateway",
            version=version("mtrl"),
            lifespan=lambda _: room(gateway, one_client=one_client),
            get_tool_input_schema=self._schema,
        )
        self._shelf, self._offer = Shelf(gateway), Offer(gateway)
        listed, named = mcp.PaginatedRequestParams, mcp.NotificationParams
        self.add_request_handler("tools/list", listed, _list_tools)
        self.add_request_handler("tools/call", mcp.CallToolRequestParams, _call_tool)
        self.add_request_handler("resources/list", listed, _list_resources)
        self.add_request_handler("resources/templates/list", listed, _list_templates)
        self.add_request_handler("resources/read", mcp.ReadResourceRequestParams, _read_resource)
        self.add_request_handler("resources/subscribe", mcp.SubscribeRequestParams, _subscribe)
        self.add_request_handler("resources/unsubscribe", mcp.UnsubscribeRequestParams, _unsubscribe)
        self.add_request_handler("prompts/list", listed, _list_prompts)
        self.add_request_handler("prompts/get", mcp.GetPromptRequestParams, _get_prompt)
        self.add_request_handler("completion/complete", mcp.CompleteRequestParams, _complete)
        self.add_request_handler("logging/setLevel", mcp.SetLevelRequestParams, _set_level)
        self.add_request_handler("subscriptions/listen", mcp.SubscriptionsListenRequestParams, _listen)
        self.add_notification_handler("notifications/initialized", named, _greet)

    def _schema(self, name: str) -> Mapping[str, Any] | None:
        """Some arguments travel as headers too, and must agree with them."""
        spec = self._offer.tools.get(name)
        return None if spec is None else spec.parameters

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> mcp.ServerCapabilities:
        """As things are behind us now, whatever handlers there are."""
        having = self._shelf.having
        return mcp.ServerCapabilities(
            tools=mcp.ToolsCapability(list_changed=True),
            resources=mcp.ResourcesCapability(subscribe=True, list_changed=True) if having("resources") else None,
            prompts=mcp.PromptsCapability(list_changed=True) if having("prompts") else None,
            completions=mcp.CompletionsCapability() if having("completions") else None,
            logging=mcp.LoggingCapability() if having("logging") else None,
        )


async def _list_tools(asked: Asked, params: mcp.PaginatedRequestParams) -> Answer:
    tools = [to_tool(spec, modern=modern(asked)) for spec in asked.lifespan_context.offer.tools.values()]
    return page("tools/list", asked.protocol_version, "tools", tools, params.cursor)


async def _call_tool(asked: Asked, params: mcp.CallToolRequestParams) -> Any:
    here: Room = asked.lifespan_context
    call = ToolCall(str(asked.request_id), params.name, json.dumps(params.arguments or {}))

    async def work(context: Context) -> Answer:
        async with here.session(asked, call.name) as session:
            return _answer(await session.call(call, context), modern=modern(asked))

    return await here.converse(asked, work)


def _answer(result: ToolResult, *, modern: bool) -> Answer:
    """What an upstream refused in the words of the protocol is refused in them again."""
    refused = result.meta.get(JSONRPC_ERROR)
    if isinstance(refused, Mapping):
        raise MCPError(int(refused["code"]), result.reason or "", refused.get("data"))
    return to_answer(result, modern=modern)


async def _list_resources(asked: Asked, params: mcp.PaginatedRequestParams) -> Answer:
    items = await asked.lifespan_context.shelf.resources()
    return page("resources/list", asked.protocol_version, "resources", items, params.cursor)


async def _list_templates(asked: Asked, params: mcp.PaginatedRequestParams) -> Answer:
    items = await asked.lifespan_context.shelf.templates()
    return page("resources/templates/list", asked.protocol_version, "resourceTemplates", items, params.cursor)


async def _list_prompts(asked: Asked, params: mcp.PaginatedRequestParams) -> Answer:
    items = await asked.lifespan_context.shelf.prompts()
    return page("prompts/list", asked.protocol_version, "prompts", items, params.cursor)


async def _read_resource(asked: Asked, _: mcp.ReadResourceRequestParams) -> Any:
    here: Room = asked.lifespan_context

    async def work(context: Context) -> Answer:
        return _passed(await here.shelf.read(_words(asked), context))

    return await here.converse(asked, work)


async def _get_prompt(asked: Asked, _: mcp.GetPromptRequestParams) -> Any:
    here: Room = asked.lifespan_context

    async def work(context: Context) -> Answer:
        return _passed(await here.shelf.prompt(_words(asked), context))

    return await here.converse(asked, work)


async def _complete(asked: Asked, _: mcp.CompleteRequestParams) -> Answer:
    return _passed(await asked.lifespan_context.shelf.complete(_words(asked), behind(asked)))


def _words(asked: Asked) -> Answer:
    """The request itself; what belongs to its journey is the context's."""
    journey = ("_meta", "inputResponses", "requestState")
    return {key: value for key, value in (asked.params or {}).items() if key not in journey}


def _passed(result: Answer) -> Answer:
    meta = result.get("_meta")
    return {**COMPLETE, **result, "_meta": foreign(meta) if isinstance(meta, Mapping) else {}}


async def _subscribe(asked: Asked, params: mcp.SubscribeRequestParams) -> Answer:
    asked.lifespan_context.shelf.need("resources", "resources/subscribe")
    await asked.lifespan_context.news.subscribe(connection(asked), str(params.uri))
    return {}


async def _unsubscribe(asked: Asked, params: mcp.UnsubscribeRequestParams) -> Answer:
    await asked.lifespan_context.news.unsubscribe(connection(asked), str(params.uri))
    return {}


async def _set_level(asked: Asked, params: mcp.SetLevelRequestParams) -> Answer:
    """Each client hears its own level; a server that several share is asked for the most talkative one."""
    here: Room = asked.lifespan_context
    connection(asked).state[LEVEL] = params.level
    if _LEVELS.index(params.level) < _LEVELS.index(here.level):
        here.level = params.level
        for server in here.shelf.having("logging"):
            await ask(server, "logging/setLevel", {"level": here.level}, Context())
    return {}


async def _listen(asked: Asked, params: mcp.SubscriptionsListenRequestParams) -> Any:
    here: Room = asked.lifespan_context
    uris: list[str] = []
    try:
        for uri in params.notifications.resource_subscriptions or ():
            uris.append(uri)
            await here.news.follow(uri)
        return await here.listen(asked, params)
    finally:
        with anyio.move_on_after(CLOSE_S, shield=True):
            for uri in uris:
                await here.news.unfollow(uri)


async def _greet(asked: Asked, _: mcp.NotificationParams) -> None:
    asked.lifespan_context.news.join(connection(asked))
