"""The program that chats in a v1 rollout: it offers the task's tools to the model until that answers without a call.

Runs in a host process as a harness of `verifiers`, and does what its `null` harness does, without a process for each
rollout. What the model and the tools see passes through verifiers' own interception server.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    HarnessBase = Any
    ConfigBase = Any
else:
    _vf = importlib.import_module("verifiers.v1")
    ConfigBase = _vf.HarnessConfig
    HarnessBase = _vf.Harness

__all__ = ["ChatHarness"]


class ChatHarnessConfig(ConfigBase):  # type: ignore[misc]
    """A harness's configuration without fields of its own."""


class ChatHarness(HarnessBase[ChatHarnessConfig] if not TYPE_CHECKING else object):  # type: ignore[misc]
    """Chats in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, *given: Any, **options: Any) -> Any:
        """Runs the chat; an answer that is refused ends it, with the reason in verifiers' own trace."""
        ctx, _, _, endpoint, secret, mcp_urls, data, *_ = given  # As verifiers names them: the model, ..., the task.
        httpx = importlib.import_module("httpx")
        tools: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, headers=headers))
            schemas, dispatch, connections = await tools.connect_mcp({"mcpServers": servers}, stack)

            async def call(function: Mapping[str, Any]) -> Any:
                return await _call_tool(tools, connections, dispatch, function)

            request = {"model": ctx.model, "messages": self._opening(data), **({"tools": schemas} if schemas else {})}
            return await _chat(client, f"{endpoint}/chat/completions", request, call)

    def _opening(self, data: Any) -> list[dict[str, Any]]:
        to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(to_wire(message) for message in prompt or ())]


async def _chat(client: Any, url: str, request: dict[str, Any], call: Any) -> Any:
    """Asks for turns and calls tools until there is a turn without calls, or no turn."""
    runtimes = importlib.import_module("verifiers.v1.runtimes")
    bound = importlib.import_module("verifiers.v1.harnesses.utils.compaction").bound_tool_message
    messages = request["messages"]
    while True:
        response = await client.post(url, json=request)
        if response.status_code != 200:
            is_over = "maximum context length" in response.text
            return runtimes.ProgramResult(exit_code=0 if is_over else 1, stdout="", stderr=response.text)
        message = response.json()["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        calls = message.get("tool_calls") or []
        if not calls:
            return runtimes.ProgramResult(exit_code=0, stdout="", stderr="")
        for one in calls:
            function = one["function"]
            answer = {"role": "tool", "tool_call_id": one["id"], "name": function["name"]}
            messages.append(bound({**answer, "content": await call(function)}))


async def _call_tool(tools: Any, connections: Any, dispatch: Any, function: Mapping[str, Any]) -> Any:
    """What the model reads as the answer to one call, in the words of verifiers' own programs."""
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        return f"error: these arguments are not valid JSON ({error}); send the call again"
    if not isinstance(arguments, dict):
        return f"error: the arguments are a {type(arguments).__name__}, not an object; send the call again"
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    return await tools.call_mcp(connections, dispatch, name, arguments)
