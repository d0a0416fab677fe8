"""The protocol of OpenAI's Responses: reads items of input, and writes items of output."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import ToolCall
from gateway.wire import dumps
from mtrl_plugins.agents import chat_dialect
from mtrl_plugins.agents.chat_dialect import make_tool
from mtrl_plugins.agents.message_cache import MessageCache
from mtrl_plugins.agents.message_content import read_content
from mtrl_plugins.agents.policy_request import PolicyAnswer, PolicyRequest, refuse, require
from mtrl_plugins.agents.request_fields import read_integer, read_list, read_number, read_object
from mtrl_plugins.agents.response_items import FREE_TEXT, read_free_text, read_items
from trainer.ledger import Message

PATH = "/responses"
write_problem = chat_dialect.write_problem


def read_request(body: Mapping[str, Any], cache: MessageCache) -> PolicyRequest:
    """The request in a body. Raises PolicyProblem, which names the field."""
    _refuse_unsupported(body)
    given = body.get("input")
    require(isinstance(given, str | list) and given, "must be text or a list of items", "input")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": read_content(body["instructions"], "instructions")})
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else read_items(given or ())
    tools, free, left_out = _read_tools(read_list(body, "tools"))
    return PolicyRequest(
        tuple(cache.read_all(messages, "input", lambda message, where: [message])),
        () if body.get("tool_choice") == "none" else tools,
        read_integer(body, "max_output_tokens"),
        read_number(body, "temperature"),
        read_number(body, "top_p"),
        (),
        body.get("parallel_tool_calls") is not False,
        bool(body.get("stream")),
        "message.output_text.logprobs" in read_list(body, "include"),
        {
            "model": str(body.get("model", "")),
            "previous": body.get("previous_response_id"),
            "free": free,
            "left_out": left_out,
            "echo": {name: body[name] for name in ("instructions", "tools", "metadata", "reasoning") if name in body},
        },
    )


def write_answer(answer: PolicyAnswer, request: PolicyRequest) -> bytes:
    """The whole answer."""
    return dumps(make_response(answer, request, _items(answer, request)))


def _items(answer: PolicyAnswer, request: PolicyRequest) -> list[dict[str, Any]]:
    items = [make_reasoning_item(answer.id, answer.reasoning)] if answer.reasoning else []
    if answer.content or not answer.calls:
        items.append(make_text_item(answer, answer.content))
    return items + [make_call_item(call, request) for call in answer.calls]


def make_reasoning_item(id: str, text: str) -> dict[str, Any]:
    """Reasoning as an item."""
    thought = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": [thought]}


def make_text_item(answer: PolicyAnswer, text: str) -> dict[str, Any]:
    """Content as an item."""
    logprobs = [{"token": text, "logprob": value, "bytes": [], "top_logprobs": []} for text, value in answer.tokens]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
    return {**message, "content": [part]}


def make_call_item(call: ToolCall, request: PolicyRequest) -> dict[str, Any]:
    """A call as an item."""
    place = {"call_id": call.id, "name": call.name, "status": "completed"}
    if call.name in request.options["free"]:
        return {"type": "custom_tool_call", "id": f"ctc_{call.id}", **place, "input": read_free_text(call.arguments)}
    return {"type": "function_call", "id": f"fc_{call.id}", **place, "arguments": call.arguments}


def make_response(answer: PolicyAnswer, request: PolicyRequest, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole response."""
    truncated = answer.finish_reason == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "model": request.options["model"],
        "output": list(output),
        "parallel_tool_calls": request.parallel_calls,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "instructions": None,
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
        **request.options["echo"],
    }


def _read_tools(tools: Sequence[Any]) -> tuple[tuple[Mapping[str, Any], ...], frozenset[str], tuple[str, ...]]:
    """The tools as functions, the names of those that take free text, and the kinds that are not shown."""
    functions, free, left_out = [], set(), []
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        require(isinstance(tool, Mapping) and isinstance(tool.get("type"), str), "needs a type", where)
        if tool["type"] not in ("function", "custom"):
            left_out.append(tool["type"])
            continue
        require(isinstance(tool.get("name"), str), "needs a name", where)
        schema = FREE_TEXT if tool["type"] == "custom" else tool.get("parameters")
        functions.append(make_tool(tool["name"], tool.get("description"), schema))
        free |= {tool["name"]} if tool["type"] == "custom" else set()
    return tuple(functions), frozenset(free), tuple(left_out)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    choice = body.get("tool_choice")
    forced = "the policy is free to call or not: nothing constrains what it samples"
    refuse(choice not in (None, "auto", "none"), forced, "tool_choice")
    kind = read_object(read_object(body, "text"), "format").get("type", "text")
    refuse(kind != "text", "the policy's text is not constrained: only `text`", "text.format")
    refuse(body.get("background"), "answers are not kept for later", "background")
    refuse(body.get("top_logprobs"), "only the sampled token's own logprob is known", "top_logprobs")
    refuse(body.get("conversation"), "chats are not kept here: send the whole input", "conversation")
