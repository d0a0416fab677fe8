"""The protocol of OpenAI's Chat Completions: reads requests, writes answers, whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.wire import dumps
from mtrl_plugins.agents.requests import (
    MessageCache,
    PolicyAnswer,
    PolicyProblem,
    PolicyRequest,
    TurnStart,
    asks_form,
    read_content,
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

PATH = "/v1/chat/completions"
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_ERROR_TYPES = {"unauthorized": "authentication_error", "not_found": "not_found_error", "unavailable": "server_error"}
_ERROR_CODES = {"context_length": "context_length_exceeded", "unsupported": "unsupported_value", "ended": "ended"}


def read_request(body: Mapping[str, Any], cache: MessageCache) -> PolicyRequest:
    """The request in a body. Raises PolicyProblem, which names the field."""
    _refuse_unsupported(body)
    messages = read_list(body, "messages")
    require(messages, "must be a list of at least one message", "messages")
    return PolicyRequest(
        tuple(cache.read_all(messages, "messages", _read_message)),
        () if body.get("tool_choice") == "none" else read_tools(read_list(body, "tools")),
        read_integer(body, "max_completion_tokens") or read_integer(body, "max_tokens"),
        read_number(body, "temperature"),
        read_number(body, "top_p"),
        read_texts(body, "stop"),
        body.get("parallel_tool_calls") is not False,
        bool(body.get("stream")),
        bool(body.get("logprobs")),
        {"usage": bool(read_object(body, "stream_options").get("include_usage")), "model": str(body.get("model", ""))},
        asks_form(body.get("tool_choice"), read_object(body, "response_format").get("type")),
    )


def write_answer(answer: PolicyAnswer, request: PolicyRequest) -> bytes:
    """The whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [build_call(call.id, call.name, call.arguments) for call in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": _logprobs(answer)}
    return dumps({**_head(answer.id, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)})


class ChatEvents(EventWriter):
    """An answer as chunks."""

    _id = ""

    def begin(self, start: TurnStart) -> bytes:
        self._id = start.id
        return self._chunk({"role": "assistant", "content": ""})

    def write_reasoning(self, text: str) -> bytes:
        return self._chunk({"reasoning_content": text})

    def write_content(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def write_end(self, answer: PolicyAnswer) -> bytes:
        calls = (build_call(call.id, call.name, call.arguments) for call in answer.calls)
        events = [self._chunk({"tool_calls": [{"index": index, **call}]}) for index, call in enumerate(calls)]
        events.append(self._chunk({}, answer.finish_reason, _logprobs(answer)))
        if self.request.options.get("usage"):
            events.append(write_event({**self._head, "choices": [], "usage": _usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def fail(self, problem: PolicyProblem) -> bytes:
        return b"data: " + write_problem(problem) + b"\n\n"

    @property
    def _head(self) -> dict[str, Any]:
        return _head(self._id, self.request, "chat.completion.chunk")

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return write_event({**self._head, "choices": [choice]})


def write_problem(problem: PolicyProblem) -> bytes:
    """An error as OpenAI writes it."""
    kind = _ERROR_TYPES.get(problem.kind, "invalid_request_error")
    code = _ERROR_CODES.get(problem.kind)
    return dumps({"error": {"message": problem.message, "type": kind, "param": problem.param, "code": code}})


def read_tools(tools: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """The function schemas, with the fields that templates take."""
    return tuple(_read_tool(tool, f"tools.{index}") for index, tool in enumerate(tools))


def _read_tool(tool: Any, where: str) -> Mapping[str, Any]:
    require(isinstance(tool, Mapping), "must be an object", where)
    refuse(tool.get("type", "function") != "function", f"only functions are supported, not {tool.get('type')!r}", where)
    function = tool.get("function")
    require(isinstance(function, Mapping) and isinstance(function.get("name"), str), "needs a function's name", where)
    return make_tool(function["name"], function.get("description"), function.get("parameters"))


def make_tool(name: str, description: Any, parameters: Any) -> Mapping[str, Any]:
    """A function schema as templates take it."""
    schema = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": str(description or ""), "parameters": dict(schema)},
    }


def _read_message(message: Any, where: str) -> Iterator[Message]:
    require(isinstance(message, Mapping), "must be an object", where)
    role = message.get("role")
    require(role in _ROLES, f"must be one of {', '.join(sorted(_ROLES))}", f"{where}.role")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    read["content"] = read_content(message.get("content"), f"{where}.content")
    if role == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id", ""))
    if role == "assistant":
        reasoning = next((message[name] for name in _REASONING_FIELDS if isinstance(message.get(name), str)), "")
        read |= {"reasoning_content": reasoning} if reasoning else {}
        calls = read_list(message, "tool_calls")
        read |= {"tool_calls": [_read_call(call, f"{where}.tool_calls") for call in calls]} if calls else {}
    yield read


def _read_call(call: Any, where: str) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    require(isinstance(function, Mapping) and isinstance(function.get("name"), str), "needs a function's name", where)
    arguments = (function or {}).get("arguments", "")
    require(isinstance(arguments, str), "arguments must be JSON text", where)
    return build_call(str(call.get("id", "")), (function or {})["name"], arguments)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    refuse(body.get("n") not in (None, 1), "only one answer at a time: ask again for another", "n")
    refuse(body.get("functions"), "use `tools`", "functions")
    refuse(body.get("logit_bias"), "would sample from another policy than the one that is trained", "logit_bias")
    for name in ("presence_penalty", "frequency_penalty"):
        refuse(body.get(name), "would sample from another policy than the one that is trained", name)
    refuse(body.get("top_logprobs"), "only the sampled token's own logprob is known", "top_logprobs")
    refuse("audio" in read_list(body, "modalities"), "only text is written", "modalities")


def _head(id: str, request: PolicyRequest, kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{id}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.options.get("model", "")}


def _usage(answer: PolicyAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _logprobs(answer: PolicyAnswer) -> dict[str, Sequence[Any]] | None:
    if not answer.tokens:
        return None
    rows = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.tokens
    ]
    return {"content": rows}
