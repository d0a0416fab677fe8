"""The protocol of OpenAI's Responses: reads items of input, writes items of output, whole or as a stream of events.

What one turn of the policy became, several items, is one message again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import ToolCall
from gateway.wire import dumps
from mtrl_plugins.agents import chat_dialect
from mtrl_plugins.agents.chat_dialect import make_tool
from mtrl_plugins.agents.requests import (
    MessageCache,
    PolicyAnswer,
    PolicyProblem,
    PolicyRequest,
    TurnStart,
    asks_form,
    find_turn,
    read_content,
    read_integer,
    read_list,
    read_number,
    read_object,
    refuse,
    require,
)
from mtrl_plugins.agents.turn_stream import EventWriter, write_event
from trainer.ledger import Message
from trainer.template.chat_template import build_call

FREE_TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The parameters under which the policy sees a tool that takes free text."""
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = frozenset({"system", "developer", "user", "assistant"})


def read_items(items: Sequence[Any]) -> list[Message]:
    """The messages of a list of items."""
    reader = _Reader()
    for index, item in enumerate(items):
        reader.add(item, f"input.{index}")
    return [*reader.messages]


def read_free_text(arguments: str) -> str:
    """The free text in a call's arguments; all of them where the policy wrote something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


class _Reader:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The policy's turn that the latest items belong to."""

    def add(self, item: Any, where: str) -> None:
        require(isinstance(item, Mapping), "must be an object", where)
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind in _CALLS:
            self._add_call(item, _CALLS[kind], where)
        elif kind in _OUTPUTS:
            self._turn = None
            content = read_content(item.get("output"), f"{where}.output")
            self.messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content})
        else:
            refuse(True, f"items of type {kind!r} are not supported", where)

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        require(role in _ROLES, f"must be one of {', '.join(sorted(_ROLES))}", f"{where}.role")
        content = read_content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": "system" if role == "developer" else role, "content": content})
            return
        turn = self._open_turn(new="content" in (self._turn or {}) and bool((self._turn or {})["content"]))
        turn["content"] = content

    def _add_reasoning(self, item: Mapping[str, Any]) -> None:
        parts = item.get("content") or item.get("summary") or ()
        text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        turn = self._open_turn()
        if text:
            turn["reasoning_content"] = "\n".join(filter(None, [turn.get("reasoning_content"), text]))

    def _add_call(self, item: Mapping[str, Any], field: str, where: str) -> None:
        require(isinstance(item.get("name"), str), "needs a name", where)
        text = item.get(field)
        require(isinstance(text, str), "must be text", f"{where}.{field}")
        arguments = str(text) if field == "arguments" else json.dumps({"input": text})
        turn = self._turn or self._reopen_turn(str(item.get("call_id", ""))) or self._open_turn()
        turn.setdefault("tool_calls", []).append(build_call(str(item.get("call_id", "")), item["name"], arguments))

    def _reopen_turn(self, call_id: str) -> dict[str, Any] | None:
        """The turn that a call belongs to by its id, where outputs of earlier calls of it stand between."""
        turn: dict[str, Any] = next((one for one in reversed(self.messages) if one["role"] != "tool"), {})
        ids = [call["id"] for call in turn.get("tool_calls") or ()]
        return turn if ids and find_turn(call_id) is not None and find_turn(ids[0]) == find_turn(call_id) else None

    def _open_turn(self, *, new: bool = False) -> dict[str, Any]:
        if self._turn is None or new:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn


PATH = "/v1/responses"
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
        asks_form(body.get("tool_choice"), read_object(read_object(body, "text"), "format").get("type")),
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
    refuse(body.get("background"), "answers are not kept for later", "background")
    refuse(body.get("top_logprobs"), "only the sampled token's own logprob is known", "top_logprobs")
    refuse(body.get("conversation"), "chats are not kept here: send the whole input", "conversation")


class ResponsesEvents(EventWriter):
    """An answer as items; one of reasoning or text is open at a time."""

    _number = 0
    _open = ""
    """The type of the open item."""
    _text = ""
    """The text of the open item."""

    def begin(self, start: TurnStart) -> bytes:
        self._answer = PolicyAnswer(start.id, "", "", (), "stop", start.prompt_tokens, 0, 0)
        self._items: list[Mapping[str, Any]] = []
        started = {**make_response(self._answer, self.request, []), "status": "in_progress", "usage": None}
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def write_reasoning(self, text: str) -> bytes:
        text = text.removeprefix("\n") if self._open != "reasoning" else text
        events = self._switch("reasoning")
        self._text += text
        return events + self._event("response.reasoning_text.delta", delta=text, **self._place, content_index=0)

    def write_content(self, text: str) -> bytes:
        events = self._switch("message")
        self._text += text
        place = {**self._place, "content_index": 0}
        return events + self._event("response.output_text.delta", delta=text, logprobs=[], **place)

    def write_end(self, answer: PolicyAnswer) -> bytes:
        self._answer = answer
        events = [b"" if answer.content or answer.calls else self._switch("message"), self._close()]
        events += [self._write_call(make_call_item(call, self.request)) for call in answer.calls]
        done = make_response(answer, self.request, self._items)
        return b"".join([*events, self._event(f"response.{done['status']}", response=done)])

    def fail(self, problem: PolicyProblem) -> bytes:
        opening = b"" if hasattr(self, "_answer") else self.begin(TurnStart("failed", 0))
        failed = make_response(self._answer, self.request, self._items)
        error = {"code": "server_error", "message": problem.message}
        return opening + self._event(
            "response.failed", response={**failed, "status": "failed", "error": error, "usage": None}
        )

    def _write_call(self, item: dict[str, Any]) -> bytes:
        field = "arguments" if item["type"] == "function_call" else "input"
        kind = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
        self._items.append(item)
        whole = {field: item[field]} | ({"name": item["name"]} if field == "arguments" else {})
        index = self._place["output_index"]
        return b"".join(
            [
                self._event(
                    "response.output_item.added", output_index=index, item={**item, field: "", "status": "in_progress"}
                ),
                self._event(f"response.{kind}.delta", **self._place, delta=item[field]),
                self._event(f"response.{kind}.done", **self._place, **whole),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        )

    def _switch(self, kind: str) -> bytes:
        """Opens an item of this type, unless it is open."""
        if self._open == kind:
            return b""
        events = self._close()
        self._open, self._text = kind, ""
        item = self._make_item()
        if self._items:
            item["id"] += f"-{len(self._items)}"
        self._items.append(item)
        added = {**item, "content": [], "status": "in_progress"}
        events += self._event("response.output_item.added", output_index=self._place["output_index"], item=added)
        if kind == "message":
            events += self._event(
                "response.content_part.added", part=item["content"][0], **self._place, content_index=0
            )
        return events

    def _close(self) -> bytes:
        """Closes the open item."""
        if not self._open:
            return b""
        item = self._items[-1] = {**self._make_item(), "id": self._items[-1]["id"]}
        part, place = item["content"][0], {**self._place, "content_index": 0}
        if self._open == "reasoning":
            events = self._event("response.reasoning_text.done", text=part["text"], **place)
        else:
            events = self._event(
                "response.output_text.done", text=part["text"], logprobs=part["logprobs"], **place
            ) + self._event("response.content_part.done", part=part, **place)
        self._open = ""
        return events + self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _make_item(self) -> dict[str, Any]:
        if self._open == "message":
            return make_text_item(self._answer, self._text)
        return make_reasoning_item(self._answer.id, self._text)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return write_event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)
