"""An MCP server with every feature of the protocol, to test that a gateway in front of it passes all of them on.

It has the tools, resources and prompts that the MCP conformance suite expects, in old and modern protocol versions.
With `--port N` it serves `http://127.0.0.1:N/mcp`, without it uses stdio.
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
from everything import input_tools, tools
from everything.task_tools import EXTENSION, TaskParams, TaskTools
from everything.tools import PNG, elicitation_request, text
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
"""For each prompt, its description and required arguments."""


def user_prompt(*content: types.ContentBlock) -> types.GetPromptResult:
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=part) for part in content])


class Everything:
    """The handlers for tools, resources, prompts and completions."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.subscribed: set[str] = set()
        self.tasks = TaskTools()
        self.tools = tools.build_table(self.bus) | input_tools.build_table() | self.tasks.build_table()

    async def list_tools(self, ctx: Context, page: Page) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool.spec for tool in self.tools.values()])

    async def call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        if params.name not in self.tools:
            raise MCPError(types.INVALID_PARAMS, f"There is no tool {params.name!r}")
        return await self.tools[params.name].run(ctx, params)

    async def list_resources(self, ctx: Context, page: Page) -> types.ListResourcesResult:
        listed = [types.Resource(uri=uri, name=uri, mime_type=mime_type) for uri, (mime_type, _) in RESOURCES.items()]
        return types.ListResourcesResult(resources=listed)

    async def list_templates(self, ctx: Context, page: Page) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(uri_template=TEMPLATE, name="data by id", mime_type="application/json")
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        match = re.fullmatch(r"test://template/([^/]+)/data", uri)
        resource = ("application/json", json.dumps({"id": match[1]})) if match else RESOURCES.get(uri)
        if resource is None:
            raise MCPError(types.INVALID_PARAMS, f"There is no resource {uri}", data={"uri": uri})
        return types.ReadResourceResult(contents=[tools.contents(uri, *resource)])

    async def subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        self.subscribed.add(str(params.uri))
        return types.EmptyResult()

    async def unsubscribe(self, ctx: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        self.subscribed.discard(str(params.uri))
        return types.EmptyResult()

    async def list_prompts(self, ctx: Context, page: Page) -> types.ListPromptsResult:
        prompts = []
        for name, (description, *arguments) in PROMPTS.items():
            prompt_arguments = [types.PromptArgument(name=argument, required=True) for argument in arguments]
            prompts.append(types.Prompt(name=name, description=description, arguments=prompt_arguments))
        return types.ListPromptsResult(prompts=prompts)

    async def get_prompt(
        self, ctx: Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult | types.InputRequiredResult:
        arguments = params.arguments or {}
        if params.name not in PROMPTS:
            raise MCPError(types.INVALID_PARAMS, f"There is no prompt {params.name!r}")
        if missing := [name for name in PROMPTS[params.name][1:] if name not in arguments]:
            raise MCPError(types.INVALID_PARAMS, f"Prompt {params.name!r} needs {', '.join(missing)}")
        match params.name:
            case "test_prompt_with_arguments":
                return user_prompt(text(f"First {arguments['arg1']}, then {arguments['arg2']}."))
            case "test_prompt_with_embedded_resource":
                return user_prompt(
                    tools.embedded(arguments["resourceUri"], "text/plain", "Words of it."), text("Read this.")
                )
            case "test_prompt_with_image":
                return user_prompt(tools.image(), text("Look at this."))
            case "test_input_required_result_prompt":
                answer = input_tools.get_answer(params, "user_context")
                if answer is None:
                    request = elicitation_request("In which context?", context={"type": "string"})
                    return types.InputRequiredResult(input_requests={"user_context": request})
                return user_prompt(text(f"The context is {answer.get('context')}."))
        return user_prompt(text("Say something simple."))

    async def complete(self, ctx: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        prefix = params.argument.value
        values = [value for value in ("paris", "park", "party") if value.startswith(prefix)]
        return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))

    async def set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        return types.EmptyResult()


def build_server() -> Server[Any]:
    everything = Everything()
    cache_hint = CacheHint(ttl_ms=1000, scope="public")
    server: Server[Any] = Server(
        NAME,
        version="1.0.0",
        instructions="Offers one of everything.",
        cache_hints={
            "tools/list": cache_hint,
            "prompts/list": cache_hint,
            "resources/list": cache_hint,
            "resources/templates/list": cache_hint,
            "resources/read": cache_hint,
        },
        get_tool_input_schema=lambda name: (
            everything.tools[name].spec.input_schema if name in everything.tools else None
        ),
        on_list_tools=everything.list_tools,
        on_call_tool=everything.call_tool,
        on_list_resources=everything.list_resources,
        on_list_resource_templates=everything.list_templates,
        on_read_resource=everything.read_resource,
        on_subscribe_resource=everything.subscribe,
        on_unsubscribe_resource=everything.unsubscribe,
        on_subscriptions_listen=ListenHandler(everything.bus),
        on_list_prompts=everything.list_prompts,
        on_get_prompt=everything.get_prompt,
        on_completion=everything.complete,
        on_set_logging_level=everything.set_level,
    )
    tasks = everything.tasks
    server.extensions[EXTENSION] = {}
    for method, handler in (("get", tasks.get), ("update", tasks.update), ("cancel", tasks.cancel)):
        server.add_request_handler(f"tasks/{method}", TaskParams, handler)
    # Seals the request state, so that a client cannot return a forged one.
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
    # Logging and sampling are deprecated, but older protocol versions still need them.
    warnings.simplefilter("ignore", MCPDeprecationWarning)
    if port is None:
        anyio.run(serve_stdio, build_server())
    else:
        # h11, because httptools keeps the white space around header values, which is not part of them.
        app = build_server().streamable_http_app()
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", http="h11", timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
