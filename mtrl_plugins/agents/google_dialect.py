"""The protocol of Google's Gemini API: reads requests, writes answers, whole or as a stream of events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.types import EMPTY
from gateway.wire import dumps
from mtrl_plugins.agents.anthropic_dialect import read_arguments
from mtrl_plugins.agents.chat_dialect import make_tool
from mtrl_plugins.agents.requests import (
    MessageCache,
    PolicyAnswer,
    PolicyProblem,
    PolicyRequest,
    TurnStart,
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

COUNT_PATH = "/google/countTokens"
_PATH = re.compile(r"(.*)/v1(?:alpha|beta)?/models/[^/]+:(generateContent|streamGenerateContent|countTokens)")
"""Clients ask for several versions of the API, which are the same here."""
_STATUSES = {"unauthorized": "UNAUTHENTICATED", "not_found": "NOT_FOUND", "unavailable": "UNAVAILABLE"}
_ONE_TEXT = ("output", "result", "error", "content")
"""Keys under which clients send a result that is a text."""


class GooglePaths:
    """Takes the version and the model's name out of a path: any are served."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (match := _PATH.fullmatch(scope["path"])):
            scope = {**scope, "path": f"{match[1]}/google/{match[2]}"}
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class GoogleDialect:
    """Answers as a whole or as a stream, which the path tells, not the body."""

    stream: bool

    @property
    def PATH(self) -> str:
        """Without version and model's name."""
        return f"/google/{'streamGenerateContent' if self.stream else 'generateContent'}"

    def read_request(self, body: Mapping[str, Any], cache: MessageCache) -> PolicyRequest:
        """The request in a body. Raises PolicyProblem, which names the field."""
        config, tool_config = read_object(body, "generationConfig"), read_object(body, "toolConfig")
        mode = str(read_object(tool_config, "functionCallingConfig").get("mode", "AUTO")).upper()
        refuse(config.get("candidateCount") not in (None, 1), "only one answer at a time", "candidateCount")
        for name in ("presencePenalty", "frequencyPenalty"):
            refuse(config.get(name), "would sample from another policy than the one that is trained", name)
        contents = read_list(body, "contents")
        require(contents, "must be a list of at least one content", "contents")
        tools, left_out = _read_tools(read_list(body, "tools"))
        return PolicyRequest(
            (*_read_system(body.get("systemInstruction")), *cache.read_all(contents, "contents", _read_content)),
            () if mode == "NONE" else tools,
            read_integer(config, "maxOutputTokens"),
            read_number(config, "temperature"),
            read_number(config, "topP"),
            read_texts(config, "stopSequences"),
            stream=self.stream,
            options={"left_out": (*left_out, *(("top_k",) if config.get("topK") else ()))},
            asked_form=mode == "ANY" or config.get("responseMimeType") not in (None, "text/plain"),
        )

    def write_answer(self, answer: PolicyAnswer, request: PolicyRequest) -> bytes:
        """The whole answer."""
        parts = [{"text": answer.reasoning, "thought": True}] if answer.reasoning else []
        parts += [{"text": answer.content}] if answer.content else []
        return dumps(_chunk(answer.id, [*parts, *_call_parts(answer)], answer))

    def write_problem(self, problem: PolicyProblem) -> bytes:
        """An error as Google writes it."""
        where = f"{problem.param}: " if problem.param else ""
        status = _STATUSES.get(problem.kind, "INVALID_ARGUMENT")
        return dumps({"error": {"code": problem.status, "message": f"{where}{problem.message}", "status": status}})


def read_counted(body: Mapping[str, Any], cache: MessageCache) -> PolicyRequest:
    """The request whose tokens are counted, which may be wrapped."""
    return GoogleDialect(stream=False).read_request(read_object(body, "generateContentRequest") or body, cache)


def _chunk(id: str, parts: Sequence[Mapping[str, Any]], answer: PolicyAnswer | None = None) -> dict[str, Any]:
    """What is new of an answer; at its end why it ended, and its tokens."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    if answer is None:
        return {"candidates": [candidate], "responseId": id}
    candidate["finishReason"] = "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"
    usage = {
        "promptTokenCount": answer.prompt_tokens,
        "cachedContentTokenCount": answer.cached_tokens,
        "candidatesTokenCount": answer.completion_tokens,
        "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
    }
    return {"candidates": [candidate], "usageMetadata": usage, "responseId": id}


def _call_parts(answer: PolicyAnswer) -> list[dict[str, Any]]:
    return [
        {"functionCall": {"id": call.id, "name": call.name, "args": read_arguments(call.arguments)}}
        for call in answer.calls
    ]


class GoogleEvents(EventWriter):
    """An answer as chunks."""

    keep_alive = b"\n"  # Google's client for JavaScript reads no comments.
    _id = ""

    def begin(self, start: TurnStart) -> bytes:
        self._id = start.id
        return b""

    def write_reasoning(self, text: str) -> bytes:
        return write_event(_chunk(self._id, [{"text": text, "thought": True}]))

    def write_content(self, text: str) -> bytes:
        return write_event(_chunk(self._id, [{"text": text}]))

    def write_end(self, answer: PolicyAnswer) -> bytes:
        return write_event(_chunk(answer.id, _call_parts(answer), answer))

    def fail(self, problem: PolicyProblem) -> bytes:
        return b"data: " + GoogleDialect(stream=True).write_problem(problem) + b"\n\n"


def _read_tools(tools: Sequence[Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """The functions, and the kinds of tools that run at Google, which the policy is not shown."""
    functions, left_out = [], []
    for index, tool in enumerate(tools):
        require(isinstance(tool, Mapping), "must be an object", f"tools.{index}")
        left_out += [name for name in tool if name != "functionDeclarations"]
        for one in read_list(tool, "functionDeclarations"):
            named = isinstance(one, Mapping) and isinstance(one.get("name"), str)
            require(named, "needs a function's name", f"tools.{index}")
            schema = one.get("parametersJsonSchema") or _lower_types(one.get("parameters"))
            functions.append(make_tool(one["name"], one.get("description"), schema))
    return tuple(functions), tuple(left_out)


def _lower_types(schema: Any) -> Any:
    """A schema of Google's, whose types are in capitals, as JSON Schema."""
    if isinstance(schema, list):
        return [_lower_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) else _lower_types(value)
        for name, value in schema.items()
    }


def _read_system(content: Any) -> list[Message]:
    if not content:
        return []
    parts = content if isinstance(content, str | list) else read_list(content, "parts")
    parts = [{"text": parts}] if isinstance(parts, str) else parts
    return [{"role": "system", "content": "\n".join(_read_text(part, "systemInstruction") for part in parts)}]


def _read_text(part: Any, where: str) -> str:
    require(isinstance(part, Mapping) and isinstance(part.get("text"), str), "must be parts of text", where)
    return str(part["text"])


def _read_content(content: Any, where: str) -> Iterator[Message]:
    """The messages of one content: results of functions are messages of their own."""
    require(isinstance(content, Mapping), "must be an object", where)
    role, parts = content.get("role", "user"), read_list(content, "parts")
    require(role in ("user", "model", "function"), "must be user or model", f"{where}.role")
    require(all(isinstance(part, Mapping) for part in parts), "must be objects", f"{where}.parts")
    if role == "model":
        yield _read_turn(parts, where)
        return
    results = [part["functionResponse"] for part in parts if "functionResponse" in part]
    for index, result in enumerate(results):
        require(isinstance(result, Mapping), "must be an object", f"{where}.functionResponse")
        yield {"role": "tool", "tool_call_id": _call_id(result, index), "content": _read_result(result, where)}
    rest = [_read_part(part, where) for part in parts if "functionResponse" not in part]
    if all(part["type"] == "text" for part in rest):
        if rest or not results:
            yield {"role": "user", "content": "".join(part["text"] for part in rest)}
    else:
        yield {"role": "user", "content": rest}


def _read_turn(parts: Sequence[Mapping[str, Any]], where: str) -> Message:
    calls = [read_object(part, "functionCall") for part in parts if "functionCall" in part]
    texts = [part for part in parts if "functionCall" not in part]
    content = "".join(_read_text(part, where) for part in texts if not part.get("thought"))
    thoughts = "".join(_read_text(part, where) for part in texts if part.get("thought"))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    made = [
        build_call(_call_id(call, index), str(call.get("name", "")), json.dumps(call.get("args") or {}))
        for index, call in enumerate(calls)
    ]
    return message | ({"tool_calls": made} if made else {})


def _call_id(part: Mapping[str, Any], index: int) -> str:
    """A call's id; without ids, results come in the order of the calls."""
    return str(part.get("id") or f"number_{index}")


def _read_result(result: Mapping[str, Any], where: str) -> Any:
    """The text of a result, or all of it as JSON; with its images, if it has any."""
    response = read_object(result, "response") or EMPTY
    key = next(iter(response)) if len(response) == 1 else ""
    text = response[key] if key in _ONE_TEXT and isinstance(response[key], str) else json.dumps(dict(response))
    images = [_read_part(part, where) for part in read_list(result, "parts")]
    return [{"type": "text", "text": text}, *images] if images else text


def _read_part(part: Any, where: str) -> dict[str, Any]:
    require(isinstance(part, Mapping), "must be an object", where)
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kinds = [name for name in part if name != "inlineData"]
    refuse("inlineData" not in part, f"parts with {kinds[:1]} are not supported", where)
    data = read_object(part, "inlineData")
    return make_image(f"data:{data.get('mimeType', 'image/png')};base64,{data.get('data', '')}", where)
