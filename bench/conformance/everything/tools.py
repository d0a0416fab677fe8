"""Tools that answer at once, and tools that send notifications or requests to the client while they run."""

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

NOTIFICATION_INTERVAL_S = 0.05
"""A pause, because the suite checks that notifications arrive one by one."""


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
    """A row of the table; without a schema, all properties are required."""
    schema = schema or {"type": "object", "properties": properties, "required": list(properties)}
    return name, Tool(types.Tool(name=name, description=run.__doc__, input_schema=schema), run)


def text(content: str) -> types.TextContent:
    return types.TextContent(text=content)


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


def answer_with(*content: types.ContentBlock | str, is_error: bool = False) -> types.CallToolResult:
    parts = [text(part) if isinstance(part, str) else part for part in content]
    return types.CallToolResult(content=parts, is_error=is_error)


def elicitation_request(message: str, **properties: Any) -> types.ElicitRequest:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=schema))


def sampling_request(prompt: str) -> types.CreateMessageRequest:
    request_input = types.SamplingMessage(role="user", content=text(prompt))
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[request_input], max_tokens=100))


def fixed_answer(doc: str, *content: types.ContentBlock | str, is_error: bool = False) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        return answer_with(*content, is_error=is_error)

    run.__doc__ = doc
    return run


async def send_logs(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Logs while it runs."""
    for message in ("begun", "under way", "done"):
        await ctx.session.send_log_message("info", message, related_request_id=ctx.request_id)
        await anyio.sleep(NOTIFICATION_INTERVAL_S)
    return answer_with("Logged three times.")


async def report_progress(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Reports its progress."""
    for done in (0, 50, 100):
        await ctx.session.report_progress(done, 100, f"{done} of 100")
        await anyio.sleep(NOTIFICATION_INTERVAL_S)
    return answer_with("Progressed.")


async def request_input(
    ctx: Context, params: types.CallToolRequestParams, request: types.ServerRequest, kind: type[Reply]
) -> Reply | types.InputRequiredResult:
    """The client's answer: over the connection in old versions, from the client's next call in modern ones."""
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return await ctx.session.send_request(request, kind, metadata=ServerMessageMetadata(ctx.request_id))
    answer = (params.input_responses or {}).get("answer")
    return answer if isinstance(answer, kind) else types.InputRequiredResult(input_requests={"answer": request})


async def sample_text(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks the client's model."""
    answer = await request_input(
        ctx, params, sampling_request((params.arguments or {})["prompt"]), types.CreateMessageResult
    )
    if isinstance(answer, types.InputRequiredResult):
        return answer
    return answer_with(f"LLM response: {answer.content.text if answer.content.type == 'text' else answer.content.type}")


def elicit_tool(message: str, schema: dict[str, Any]) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        """Asks the client's user."""
        prompt = (params.arguments or {}).get("message", message)
        form = types.ElicitRequest(params=types.ElicitRequestFormParams(message=prompt, requested_schema=schema))
        answer = await request_input(ctx, params, form, types.ElicitResult)
        if isinstance(answer, types.InputRequiredResult):
            return answer
        return answer_with(f"User response: action={answer.action}, content={json.dumps(answer.content or {})}")

    return run


async def require_sampling(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Refuses a client that cannot sample."""
    capabilities = ctx.session.client_capabilities
    if capabilities is None or capabilities.sampling is None:
        missing: dict[str, Any] = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "The client must be able to sample", data=missing)
    return answer_with("The client can sample.")


def announce_change(bus: InMemorySubscriptionBus, what: type[ToolsListChanged] | type[PromptsListChanged]) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        """Announces that a list has changed."""
        await bus.publish(what())
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            session = ctx.session
            await (session.send_tool_list_changed if what is ToolsListChanged else session.send_prompt_list_changed)()
        return answer_with("Announced.")

    return run


async def name_region(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Returns its region argument, which HTTP clients repeat in a header."""
    return answer_with(f"region={(params.arguments or {}).get('region')}")


def build_table(bus: InMemorySubscriptionBus) -> dict[str, Tool]:
    note = embedded("test://embedded-resource", "text/plain", "Words inside a result.")
    data = embedded("test://mixed-content-resource", "application/json", '{"one": 1}')
    string = {"type": "string"}
    user = {"type": "object", "properties": {"username": string, "email": string}, "required": ["username", "email"]}
    header_schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    return dict(
        (
            tool("test_simple_text", fixed_answer("Answers with text.", "Plain words.")),
            tool("test_image_content", fixed_answer("Answers with an image.", image())),
            tool("test_audio_content", fixed_answer("Answers with a sound.", audio())),
            tool("test_embedded_resource", fixed_answer("Answers with a resource.", note)),
            tool("test_multiple_content_types", fixed_answer("Answers with three kinds.", "Three:", image(), data)),
            tool("test_error_handling", fixed_answer("Fails.", "Failed, as it should.", is_error=True)),
            tool("test_tool_with_logging", send_logs),
            tool("test_logging_tool", send_logs),
            tool("test_tool_with_progress", report_progress),
            tool("test_sampling", sample_text, prompt=string),
            tool("test_elicitation", elicit_tool("Who are you?", user), message=string),
            tool("test_elicitation_sep1034_defaults", elicit_tool("Keep the defaults?", DEFAULTS)),
            tool("test_elicitation_sep1330_enums", elicit_tool("Which of these?", ENUMS)),
            tool("test_missing_capability", require_sampling),
            tool("test_trigger_tool_change", announce_change(bus, ToolsListChanged)),
            tool("test_trigger_prompt_change", announce_change(bus, PromptsListChanged)),
            tool("test_x_mcp_header", name_region, header_schema),
            tool("json_schema_2020_12_tool", fixed_answer("Has a rich schema.", "Accepted."), RICH),
        )
    )
