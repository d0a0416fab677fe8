"""The tools that answer in one round, and those that speak to the client while they run."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import mcp_types as types
from everything.schemas import DEFAULTS, ENUMS, RICH
from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.subscriptions import InMemorySubscriptionBus, PromptsListChanged, ToolsListChanged
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from PIL import Image

Context = ServerRequestContext[Any, Any]
Answer = types.CallToolResult | types.InputRequiredResult
Reply = TypeVar("Reply", types.CreateMessageResult, types.ElicitResult)
Run = Callable[[Context, types.CallToolRequestParams], Awaitable[Answer]]

BETWEEN_S = 0.05
"""The suite wants to see that notifications arrive one by one."""


def _png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), "teal").save(file, "PNG")
    return file.getvalue()


def _wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(b"\0\0" * 8)
    return file.getvalue()


PNG, WAV = _png(), _wav()


@dataclass(frozen=True)
class Tool:
    spec: types.Tool
    run: Run


def tool(name: str, run: Run, schema: dict[str, Any] | None = None, **properties: Any) -> tuple[str, Tool]:
    """A row of the table; without a schema every property is a required one."""
    schema = schema or {"type": "object", "properties": properties, "required": list(properties)}
    return name, Tool(types.Tool(name=name, description=run.__doc__, input_schema=schema), run)


def text(words: str) -> types.TextContent:
    return types.TextContent(text=words)


def image() -> types.ImageContent:
    return types.ImageContent(data=base64.b64encode(PNG).decode(), mime_type="image/png")


def audio() -> types.AudioContent:
    return types.AudioContent(data=base64.b64encode(WAV).decode(), mime_type="audio/wav")


def contents(uri: str, kind: str, content: str | bytes) -> types.TextResourceContents | types.BlobResourceContents:
    if isinstance(content, str):
        return types.TextResourceContents(uri=uri, mime_type=kind, text=content)
    return types.BlobResourceContents(uri=uri, mime_type=kind, blob=base64.b64encode(content).decode())


def embedded(uri: str, kind: str, content: str | bytes) -> types.EmbeddedResource:
    return types.EmbeddedResource(resource=contents(uri, kind, content))


def said(*content: types.ContentBlock | str, is_error: bool = False) -> types.CallToolResult:
    parts = [text(part) if isinstance(part, str) else part for part in content]
    return types.CallToolResult(content=parts, is_error=is_error)


def elicitation(message: str, **properties: Any) -> types.ElicitRequest:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=schema))


def question(words: str) -> types.CreateMessageRequest:
    asked = types.SamplingMessage(role="user", content=text(words))
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[asked], max_tokens=100))


def fixed(doc: str, *content: types.ContentBlock | str, is_error: bool = False) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        return said(*content, is_error=is_error)

    run.__doc__ = doc
    return run


async def log(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Logs while it runs."""
    for words in ("begun", "under way", "done"):
        await ctx.session.send_log_message("info", words, related_request_id=ctx.request_id)
        await anyio.sleep(BETWEEN_S)
    return said("Logged three times.")


async def progress(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Reports its progress."""
    for done in (0, 50, 100):
        await ctx.session.report_progress(done, 100, f"{done} of 100")
        await anyio.sleep(BETWEEN_S)
    return said("Progressed.")


async def asked(
    ctx: Context, params: types.CallToolRequestParams, request: types.ServerRequest, kind: type[Reply]
) -> Reply | types.InputRequiredResult:
    """The client's answer: over the connection in the older era, in the client's next call in the newer one."""
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return await ctx.session.send_request(request, kind, metadata=ServerMessageMetadata(ctx.request_id))
    answer = (params.input_responses or {}).get("answer")
    return answer if isinstance(answer, kind) else types.InputRequiredResult(input_requests={"answer": request})


async def sample(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks the client's model."""
    answer = await asked(ctx, params, question((params.arguments or {})["prompt"]), types.CreateMessageResult)
    if isinstance(answer, types.InputRequiredResult):
        return answer
    return said(f"LLM response: {answer.content.text if answer.content.type == 'text' else answer.content.type}")


def asks(message: str, schema: dict[str, Any]) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        """Asks the client's user."""
        words = (params.arguments or {}).get("message", message)
        form = types.ElicitRequest(params=types.ElicitRequestFormParams(message=words, requested_schema=schema))
        answer = await asked(ctx, params, form, types.ElicitResult)
        if isinstance(answer, types.InputRequiredResult):
            return answer
        return said(f"User response: action={answer.action}, content={json.dumps(answer.content or {})}")

    return run


async def needs_sampling(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Refuses a client that cannot sample."""
    able = ctx.session.client_capabilities
    if able is None or able.sampling is None:
        lacks: dict[str, Any] = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "The client must be able to sample", data=lacks)
    return said("The client can sample.")


def changes(bus: InMemorySubscriptionBus, what: type[ToolsListChanged] | type[PromptsListChanged]) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        """Says that a list has changed."""
        await bus.publish(what())
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            session = ctx.session
            await (session.send_tool_list_changed if what is ToolsListChanged else session.send_prompt_list_changed)()
        return said("Announced.")

    return run


async def region(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Names its region, which HTTP clients repeat in a header."""
    return said(f"region={(params.arguments or {}).get('region')}")


def table(bus: InMemorySubscriptionBus) -> dict[str, Tool]:
    note = embedded("test://embedded-resource", "text/plain", "Words inside a result.")
    data = embedded("test://mixed-content-resource", "application/json", '{"one": 1}')
    words = {"type": "string"}
    user = {"type": "object", "properties": {"username": words, "email": words}, "required": ["username", "email"]}
    mirrored = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    return dict(
        (
            tool("test_simple_text", fixed("Answers with text.", "Plain words.")),
            tool("test_image_content", fixed("Answers with an image.", image())),
            tool("test_audio_content", fixed("Answers with a sound.", audio())),
            tool("test_embedded_resource", fixed("Answers with a resource.", note)),
            tool("test_multiple_content_types", fixed("Answers with three kinds.", "Three:", image(), data)),
            tool("test_error_handling", fixed("Fails.", "Failed, as it should.", is_error=True)),
            tool("test_tool_with_logging", log),
            tool("test_logging_tool", log),
            tool("test_tool_with_progress", progress),
            tool("test_sampling", sample, prompt=words),
            tool("test_elicitation", asks("Who are you?", user), message=words),
            tool("test_elicitation_sep1034_defaults", asks("Keep the defaults?", DEFAULTS)),
            tool("test_elicitation_sep1330_enums", asks("Which of these?", ENUMS)),
            tool("test_missing_capability", needs_sampling),
            tool("test_trigger_tool_change", changes(bus, ToolsListChanged)),
            tool("test_trigger_prompt_change", changes(bus, PromptsListChanged)),
            tool("test_x_mcp_header", region, mirrored),
            tool("json_schema_2020_12_tool", fixed("Has a rich schema.", "Accepted."), RICH),
        )
    )
