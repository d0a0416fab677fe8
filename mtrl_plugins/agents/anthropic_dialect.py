"""The protocol of Anthropic's Messages: reads requests, writes answers, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.types import ToolCall
from gateway.wire import dumps
from mtrl_plugins.agents.chat_dialect import make_tool
from mtrl_plugins.agents.requests import (
    MessageCache,
    PolicyAnswer,
    PolicyProblem,
    PolicyRequest,
    TurnStart,
    asks_form,
    make_image,
    read_integer,
    read_list,
    read_number,
    read_object,
    read_texts,
    refuse,
    require,
)
from mtrl_plugins.agents.turn_stream import EventWriter, write_event
from trainer.ledger import Message
from trainer.template.chat_template import build_call

PATH = "/v1/messages"
UNREADABLE = "unreadable_arguments"
"""The key under which arguments that are no JSON object are given, as the protocol has objects only."""
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
_ERROR_TYPES = {
    "unauthorized": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "unavailable": "api_error",
}


def read_request(body: Mapping[str, Any], cache: MessageCache) -> PolicyRequest:
    """The request in a body. Raises PolicyProblem, which names the field."""
    choice = read_object(body, "tool_choice").get("type", "auto")
    refuse(body.get("top_k"), "would sample from another policy than the one that is trained", "top_k")
    messages = read_list(body, "messages")
    require(messages, "must be a list of at least one message", "messages")
    system = [{"role": "system", "content": _join(body["system"], "system")}] if body.get("system") else []
    tools, left_out = _read_tools(read_list(body, "tools"))
    return PolicyRequest(
        (*system, *cache.read_all(messages, "messages", _read_message)),
        () if choice == "none" else tools,
        read_integer(body, "max_tokens"),
        read_number(body, "temperature"),
        read_number(body, "top_p"),
        read_texts(body, "stop_sequences"),
        not read_object(body, "tool_choice").get("disable_parallel_tool_use"),
        bool(body.get("stream")),
        options={"model": str(body.get("model", "")), "left_out": left_out},
        asked_form=asks_form(choice, None),
    )


def write_answer(answer: PolicyAnswer, request: PolicyRequest) -> bytes:
    """The whole answer."""
    return dumps({**describe_message(answer, request), "content": _blocks(answer), "usage": count_usage(answer)})


def write_problem(problem: PolicyProblem) -> bytes:
    """An error as Anthropic writes it."""
    where = f"{problem.param}: " if problem.param else ""
    kind = _ERROR_TYPES.get(problem.kind, "invalid_request_error")
    return dumps({"type": "error", "error": {"type": kind, "message": f"{where}{problem.message}"}})


def describe_message(answer: PolicyAnswer, request: PolicyRequest) -> dict[str, Any]:
    """The message without its content."""
    stop = "stop_sequence" if answer.stop_sequence and not answer.calls else _STOP_REASONS[answer.finish_reason]
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": request.options["model"],
        "stop_reason": stop,
        "stop_sequence": answer.stop_sequence if stop == "stop_sequence" else None,
    }


def count_usage(answer: PolicyAnswer) -> dict[str, int]:
    """The tokens of an answer."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


def _blocks(answer: PolicyAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    return blocks + [make_call_block(call) for call in answer.calls]


def make_call_block(call: ToolCall) -> dict[str, Any]:
    """A call as a block."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": read_arguments(call.arguments)}


def read_arguments(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: arguments}


def write_arguments(value: Any) -> str:
    """What `read_arguments` read as the text that it was, or as another of the same meaning."""
    if isinstance(value, Mapping) and list(value) == [UNREADABLE]:
        return str(value[UNREADABLE])
    return json.dumps(value, ensure_ascii=False)


def _read_tools(tools: Sequence[Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """The tools, and the kinds that run at Anthropic, which the policy is not shown."""
    functions, left_out = [], []
    for index, tool in enumerate(tools):
        require(isinstance(tool, Mapping) and isinstance(tool.get("name"), str), "needs a name", f"tools.{index}")
        if tool.get("type") not in (None, "custom"):
            left_out.append(str(tool["type"]))
        else:
            functions.append(make_tool(tool["name"], tool.get("description"), tool.get("input_schema")))
    return tuple(functions), tuple(left_out)


def _read_message(message: Any, where: str) -> Iterator[Message]:
    """The messages of one: results of tools are messages of their own."""
    require(isinstance(message, Mapping), "must be an object", where)
    role, content = message.get("role"), message.get("content")
    require(role in ("user", "assistant", "system"), "must be user or assistant", f"{where}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    require(isinstance(blocks, list), "must be text or a list of blocks", f"{where}.content")
    require(all(isinstance(block, Mapping) for block in blocks), "must be objects", f"{where}.content")
    if role == "assistant":
        yield _read_turn(blocks, where)
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            text = _join(block.get("content") or "", where)
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    if rest or not blocks:
        yield {"role": role, "content": _join(rest, where)}


def _read_turn(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    text = [str(block.get("text", "")) for block in blocks if block.get("type") == "text"]
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    calls = [
        build_call(str(block.get("id", "")), str(block.get("name", "")), write_arguments(block.get("input", {})))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    known = {"text", "thinking", "redacted_thinking", "tool_use"}
    unknown = [block.get("type") for block in blocks if block.get("type") not in known]
    refuse(unknown, f"blocks of type {unknown[:1]} are not supported", where)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(text)}
    message |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return message | ({"tool_calls": calls} if calls else {})


def _join(content: Any, where: str) -> Any:
    """Blocks of text as one text; with images, a list of parts."""
    if isinstance(content, str):
        return content
    require(isinstance(content, list), "must be text or a list of blocks", where)
    parts = [_read_block(block, where) for block in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _read_block(block: Any, where: str) -> dict[str, Any]:
    require(isinstance(block, Mapping), "must be an object", where)
    if block.get("type") == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    refuse(block.get("type") != "image", f"blocks of type {block.get('type')!r} are not supported", where)
    source = read_object(block, "source")
    refuse(source.get("type") != "base64", "images must be base64: addresses are not fetched", where)
    return make_image(f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}", where)


_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class AnthropicEvents(EventWriter):
    """An answer as blocks; one is open at a time."""

    _open = ""
    """The type of the open block."""
    _count = 0
    """How many blocks there are."""

    def begin(self, start: TurnStart) -> bytes:
        empty = PolicyAnswer(start.id, "", "", (), "stop", start.prompt_tokens, 0, 0)
        message = {**describe_message(empty, self.request), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "content": [], "usage": count_usage(empty)})

    def write_reasoning(self, text: str) -> bytes:
        text = text.removeprefix("\n") if self._open != "thinking" else text
        return self._switch("thinking") + self._delta({"type": "thinking_delta", "thinking": text})

    def write_content(self, text: str) -> bytes:
        return self._switch("text") + self._delta({"type": "text_delta", "text": text})

    def write_end(self, answer: PolicyAnswer) -> bytes:
        events = [self._close()]
        for call in answer.calls:
            block = make_call_block(call)
            events.append(self._start({**block, "input": {}}))
            events.append(self._delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])}))
            events.append(_event("content_block_stop", index=self._count - 1))
        message = describe_message(answer, self.request)
        ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        events.append(_event("message_delta", delta=ending, usage=count_usage(answer)))
        return b"".join([*events, _event("message_stop")])

    def fail(self, problem: PolicyProblem) -> bytes:
        return b"event: error\ndata: " + write_problem(problem) + b"\n\n"

    def _switch(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        events = self._close() + self._start(_EMPTY[kind])
        self._open = kind
        return events

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._count += 1
        return _event("content_block_start", index=self._count - 1, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._count - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._count - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return write_event({"type": kind, **fields}, kind)
