"""An MCP server whose tools and prompts request input from the client (elicitation, sampling, roots).

    python tests/mcp_server/eliciting_server.py [--handshake-only]

With `--handshake-only` it does not support modern protocol versions, and sends its requests over the connection.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.server import NotificationOptions, Server, ServerRequestContext
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, PromptsListChanged, ResourceUpdated
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

RequestContext = ServerRequestContext[Any, Any]
Answer = types.CallToolResult | types.InputRequiredResult
RESULT_TYPES: dict[str, type[BaseModel]] = {
    "user": types.ElicitResult,
    "model": types.CreateMessageResult,
    "roots": types.ListRootsResult,
}


def input_requests() -> dict[str, types.ServerRequest]:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    text = types.SamplingMessage(role="user", content=types.TextContent(text="2 + 2?"))
    return {
        "user": types.ElicitRequest(
            params=types.ElicitRequestFormParams(message="Who are you?", requested_schema=schema)
        ),
        "model": types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[text], max_tokens=8)),
        "roots": types.ListRootsRequest(),
    }


def format_answer(answer: Any) -> str:
    match answer:
        case types.ElicitResult():
            return f"{answer.action} {(answer.content or {}).get('name')}"
        case types.CreateMessageResult():
            return getattr(answer.content, "text", "no text")
        case types.ListRootsResult():
            return ", ".join(str(root.uri) for root in answer.roots)
    raise TypeError(answer)


async def ask(ctx: RequestContext, params: types.CallToolRequestParams) -> Answer:
    """Requests every input that `whom` names: user, model, roots."""
    keys: list[str] = (params.arguments or {})["whom"]
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        responses = params.input_responses or {}
        if missing := {key: input_requests()[key] for key in keys if key not in responses}:
            return types.InputRequiredResult(input_requests=missing, request_state=f"asked {len(keys)}")
        if params.request_state != f"asked {len(keys)}":
            return text(f"its state came back as {params.request_state!r}")
        return text("; ".join(format_answer(responses[key]) for key in keys))
    metadata = ServerMessageMetadata(related_request_id=ctx.request_id)
    answers = [
        await ctx.session.send_request(input_requests()[key], RESULT_TYPES[key], metadata=metadata) for key in keys
    ]
    return text("; ".join(format_answer(answer) for answer in answers))


def text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)])


async def steps(ctx: RequestContext, params: types.CallToolRequestParams) -> Answer:
    """Reports progress and sends log messages."""
    for step in (1, 2):
        await ctx.session.report_progress(step, 2, f"step {step}")
        for level in ("debug", "warning"):
            log_params = types.LoggingMessageNotificationParams(level=level, data=f"{level} {step}")
            if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS or "io.modelcontextprotocol/logLevel" in (
                ctx.meta or {}
            ):
                await ctx.session.send_notification(types.LoggingMessageNotification(params=log_params), ctx.request_id)
    return text("stepped")


class ElicitingServer:
    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.subscribed: list[str] = []
        self.tools: dict[str, Callable[[RequestContext, types.CallToolRequestParams], Awaitable[Answer]]] = {
            "ask": ask,
            "steps": steps,
            "counts": self.counts,
            "touch": self.touch,
            "change_prompts": self.change_prompts,
        }

    async def counts(self, ctx: RequestContext, params: types.CallToolRequestParams) -> Answer:
        """Returns which resources are subscribed to."""
        return text(f"followed: {sorted(self.subscribed)}")

    async def touch(self, ctx: RequestContext, params: types.CallToolRequestParams) -> Answer:
        """Changes a resource."""
        uri = (params.arguments or {})["uri"]
        await self.bus.publish(ResourceUpdated(uri))
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            await ctx.session.send_resource_updated(uri)
        return text("touched")

    async def change_prompts(self, ctx: RequestContext, params: types.CallToolRequestParams) -> Answer:
        """Announces that the prompts have changed."""
        await self.bus.publish(PromptsListChanged())
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            await ctx.session.send_prompt_list_changed()
        return text("changed")

    async def list_tools(self, ctx: RequestContext, page: Any) -> types.ListToolsResult:
        schema = {"type": "object"}
        tools = [
            types.Tool(name=name, description=tool.__doc__, input_schema=schema) for name, tool in self.tools.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(self, ctx: RequestContext, params: types.CallToolRequestParams) -> Answer:
        return await self.tools[params.name](ctx, params)

    async def list_resources(
        self, ctx: RequestContext, page: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """Two pages."""
        if page is None or page.cursor is None:
            one = types.Resource(uri="asker://one", name="one", mime_type="text/plain")
            return types.ListResourcesResult(resources=[one], next_cursor="more")
        two = types.Resource(uri="asker://two", name="two")
        return types.ListResourcesResult(resources=[two, types.Resource(uri="all://same", name="asker")])

    async def list_templates(self, ctx: RequestContext, page: Any) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(uri_template="asker://by/{id}", name="by id")
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read(self, ctx: RequestContext, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        if not uri.startswith(("asker://", "all://")):
            raise MCPError(types.INVALID_PARAMS, f"asker has no {uri}", data={"uri": uri})
        contents = types.TextResourceContents(uri=uri, mime_type="text/plain", text=f"asker has {uri}")
        return types.ReadResourceResult(contents=[contents])

    async def subscribe(self, ctx: RequestContext, params: types.SubscribeRequestParams) -> types.EmptyResult:
        self.subscribed.append(str(params.uri))
        return types.EmptyResult()

    async def unsubscribe(self, ctx: RequestContext, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        self.subscribed.remove(str(params.uri))
        return types.EmptyResult()

    async def list_prompts(self, ctx: RequestContext, page: Any) -> types.ListPromptsResult:
        arguments = [types.PromptArgument(name="word", required=True)]
        return types.ListPromptsResult(prompts=[types.Prompt(name="greet", description="asker", arguments=arguments)])

    async def prompt(self, ctx: RequestContext, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        word = (params.arguments or {})["word"]
        content = types.TextContent(text=f"asker greets {word}")
        return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=content)])

    async def complete(self, ctx: RequestContext, params: types.CompleteRequestParams) -> types.CompleteResult:
        return types.CompleteResult(completion=types.Completion(values=[f"{params.argument.value}-asker"]))

    async def set_level(self, ctx: RequestContext, params: types.SetLevelRequestParams) -> types.EmptyResult:
        return types.EmptyResult()

    def server(self) -> Server[Any]:
        server: Server[Any] = Server(
            "asker",
            version="1",
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates,
            on_read_resource=self.read,
            on_subscribe_resource=self.subscribe,
            on_unsubscribe_resource=self.unsubscribe,
            on_subscriptions_listen=ListenHandler(self.bus),
            on_list_prompts=self.list_prompts,
            on_get_prompt=self.prompt,
            on_completion=self.complete,
        )
        server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, self.set_level)
        return server


async def main(handshake_only: bool) -> None:
    server = ElicitingServer().server()
    changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
    options = server.create_initialization_options(changes)
    async with stdio_server() as (read, write):
        if handshake_only:
            await serve_loop(server, read, write, lifespan_state={}, init_options=options)
        else:
            await server.run(read, write, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--handshake-only", action="store_true")
    anyio.run(main, parser.parse_args().handshake_only)
