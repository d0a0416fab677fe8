"""A gateway shows what it drops only in front of a server that offers everything; this is that server.

    python tests/conformance/upstream.py [--port N]

It has the tools, resources and prompts whose names the MCP conformance suite expects, in both protocol eras. With a
port it serves `http://localhost:N/mcp`, without one it speaks stdio.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from typing import Any

import anyio
import mcp_types as types
import uvicorn
from everything import rounds, tools
from everything.tools import PNG, elicitation, text
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.caching import CacheHint
from mcp.server.lowlevel import NotificationOptions
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.shared.exceptions import MCPDeprecationWarning

Context = ServerRequestContext[Any, Any]
Page = types.PaginatedRequestParams | None

NAME = "everything"
TEMPLATE = "test://template/{id}/data"
RESOURCES: dict[str, tuple[str, str | bytes]] = {
    "test://static-text": ("text/plain", "Words that never change."),
    "test://static-binary": ("image/png", PNG),
    "test://watched-resource": ("text/plain", "Words that somebody watches."),
}
PROMPTS: dict[str, tuple[str, ...]] = {
    "test_simple_prompt": ("Takes nothing.",),
    "test_prompt_with_arguments": ("Repeats two words.", "arg1", "arg2"),
    "test_prompt_with_embedded_resource": ("Brings a resource along.", "resourceUri"),
    "test_prompt_with_image": ("Brings an image along.",),
    "test_input_required_result_prompt": ("Asks the user for its context first.",),
}
"""For each prompt, what it says of itself and the arguments that it needs."""


def user(*content: types.ContentBlock) -> types.GetPromptResult:
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=part) for part in content])


class Everything:
    """The resources, prompts and completions; the tools are tables of their own."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.watched: set[str] = set()
        self.tools = tools.table(self.bus) | rounds.table()

    async def list_tools(self, ctx: Context, page: Page) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool.spec for tool in self.tools.values()])

    async def call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        if params.name not in self.tools:
            raise MCPError(types.INVALID_PARAMS, f"There is no tool {params.name!r}")
        return await self.tools[params.name].run(ctx, params)

    async def list_resources(self, ctx: Context, page: Page) -> types.ListResourcesResult:
        listed = [types.Resource(uri=uri, name=uri, mime_type=kind) for uri, (kind, _) in RESOURCES.items()]
        return types.ListResourcesResult(resources=listed)

    async def list_templates(self, ctx: Context, page: Page) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(uri_template=TEMPLATE, name="data by id", mime_type="application/json")
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        found = re.fullmatch(r"test://template/([^/]+)/data", uri)
        resource = ("application/json", json.dumps({"id": found[1]})) if found else RESOURCES.get(uri)
        if resource is None:
            raise MCPError(types.INVALID_PARAMS, f"There is no resource {uri}", data={"uri": uri})
        return types.ReadResourceResult(contents=[tools.contents(uri, *resource)])

    async def subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        self.watched.add(str(params.uri))
        return types.EmptyResult()

    async def unsubscribe(self, ctx: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        self.watched.discard(str(params.uri))
        return types.EmptyResult()

    async def list_prompts(self, ctx: Context, page: Page) -> types.ListPromptsResult:
        prompts = []
        for name, (doc, *arguments) in PROMPTS.items():
            wanted = [types.PromptArgument(name=argument, required=True) for argument in arguments]
            prompts.append(types.Prompt(name=name, description=doc, arguments=wanted))
        return types.ListPromptsResult(prompts=prompts)

    async def get_prompt(
        self, ctx: Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult | types.InputRequiredResult:
        given = params.arguments or {}
        if params.name not in PROMPTS:
            raise MCPError(types.INVALID_PARAMS, f"There is no prompt {params.name!r}")
        if missing := [name for name in PROMPTS[params.name][1:] if name not in given]:
            raise MCPError(types.INVALID_PARAMS, f"Prompt {params.name!r} needs {', '.join(missing)}")
        match params.name:
            case "test_prompt_with_arguments":
                return user(text(f"First {given['arg1']}, then {given['arg2']}."))
            case "test_prompt_with_embedded_resource":
                return user(tools.embedded(given["resourceUri"], "text/plain", "Words of it."), text("Read this."))
            case "test_prompt_with_image":
                return user(tools.image(), text("Look at this."))
            case "test_input_required_result_prompt":
                answer = rounds.filled(params, "user_context")
                if answer is None:
                    ask = elicitation("In which context?", context={"type": "string"})
                    return types.InputRequiredResult(input_requests={"user_context": ask})
                return user(text(f"The context is {answer.get('context')}."))
        return user(text("Say something simple."))

    async def complete(self, ctx: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        begun = params.argument.value
        values = [value for value in ("paris", "park", "party") if value.startswith(begun)]
        return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))

    async def set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        return types.EmptyResult()


def build() -> Server[Any]:
    here = Everything()
    fresh = CacheHint(ttl_ms=1000, scope="public")
    server: Server[Any] = Server(
        NAME,
        version="1.0.0",
        instructions="Offers one of everything.",
        cache_hints={
            "tools/list": fresh,
            "prompts/list": fresh,
            "resources/list": fresh,
            "resources/templates/list": fresh,
            "resources/read": fresh,
        },
        get_tool_input_schema=lambda name: here.tools[name].spec.input_schema if name in here.tools else None,
        on_list_tools=here.list_tools,
        on_call_tool=here.call_tool,
        on_list_resources=here.list_resources,
        on_list_resource_templates=here.list_templates,
        on_read_resource=here.read_resource,
        on_subscribe_resource=here.subscribe,
        on_unsubscribe_resource=here.unsubscribe,
        on_subscriptions_listen=ListenHandler(here.bus),
        on_list_prompts=here.list_prompts,
        on_get_prompt=here.get_prompt,
        on_completion=here.complete,
        on_set_logging_level=here.set_level,
    )
    # A client hands the state of a round back; sealed, it cannot hand back another.
    server.middleware.append(RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=NAME))
    return server


async def serve_stdio(server: Server[Any]) -> None:
    changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options(changes))


def main() -> None:
    parser = argparse.ArgumentParser(description="An MCP server that offers one of everything.")
    parser.add_argument("--port", type=int, default=None, help="serve HTTP here; otherwise speak stdio")
    port = parser.parse_args().port
    # Logging and sampling are leaving the protocol; the older era must still be served with them.
    warnings.simplefilter("ignore", MCPDeprecationWarning)
    if port is None:
        anyio.run(serve_stdio, build())
    else:
        # httptools leaves the space around a header's value in place, which HTTP says is no part of it; h11 does not.
        app = build().streamable_http_app()
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", http="h11", timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
