"""The protocol of Google's Gemini API: reads requests, writes answers, whole or as a stream of events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.exchange import Response
from gateway.wire import dumps
from mtrl_plugins.agents.anthropic_dialect import read_arguments, write_arguments
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
    read_query,
    read_text,
    read_texts,
    refuse,
    require,
)
from mtrl_plugins.agents.turn_stream import EventWriter, write_event
from mtrl_plugins.agents.turn_tree import match_results
from trainer.ledger import Message
from trainer.template.chat_template import build_call

COUNT_PATH = "/google/countTokens"
_PATH = re.compile(r"(.*)/v1(?:alpha|beta)?/models/[^/]+:(generateContent|streamGenerateContent|countTokens)")
"""Clients ask for several versions of the API, which are the same here."""
_STATUSES = {"unauthorized": "UNAUTHENTICATED", "not_found": "NOT_FOUND", "unavailable": "UNAVAILABLE"}
_ONE_TEXT = ("output", "result", "error", "content")
"""Keys under which clients send a result that is a text."""
_MODES = ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED")
_USER_PARTS, _MODEL_PARTS = ("text", "inlineData", "functionResponse"), ("text", "functionCall")
_PARTS = {*_USER_PARTS, *_MODEL_PARTS, "fileData", "executableCode", "codeExecutionResult", "toolCall", "toolResponse"}
"""Of these a part has one; beside it are `thought`, `thoughtSignature` and the like."""
_FREE = ("contents", "args", "response", "parameters", "parametersJsonSchema")
"""Fields whose insides are read elsewhere, or are the client's own."""
_UNDERSCORE = re.compile("(?<=[a-z0-9])_([a-z])")


class GooglePaths:
    """Takes the version and the model's name out of a path: any are served."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (match := _PATH.fullmatch(scope["path"])):
            scope = {**scope, "path": f"{match[1]}/google/{match[2]}"}
            if match[2] == "streamGenerateContent" and read_query(scope, "alt") != "sse":
                problem = PolicyProblem("unsupported", "a stream is of events: ask for `?alt=sse`", param="alt")
                answer = Response(GoogleDialect(stream=True).write_problem(problem), problem.status)
                return await answer(scope, receive, send)
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
        body = _read_fields(body)
        config, choice = read_object(body, "generationConfig"), read_object(body, "toolConfig")
        mode = read_text(read_object(choice, "functionCallingConfig"), "mode").upper()
        require(mode in ("", *_MODES), f"must be one of {', '.join(_MODES)}", "mode")
        refuse("cachedContent" in body, "no contents are kept here: send all of them", "cachedContent")
        refuse(read_integer(config, "candidateCount") not in (None, 1), "only one answer at a time", "candidateCount")
        for name in ("presencePenalty", "frequencyPenalty"):
            refuse(config.get(name, 0) != 0, "would sample from another policy than the one that is trained", name)
        contents = read_list(body, "contents")
        require(contents, "must be a list of at least one content", "contents")
        tools, left_out = _read_tools(read_list(body, "tools"))
        return PolicyRequest(
            (*_read_system(body), *match_results(cache.read_all(contents, "contents", _read_content))),
            () if mode == "NONE" else tools,
            read_integer(config, "maxOutputTokens"),
            read_number(config, "temperature"),
            read_number(config, "topP"),
            read_texts(config, "stopSequences"),
            stream=self.stream,
            options={"left_out": (*left_out, *(("top_k",) if read_number(config, "topK") else ()))},
            asked_form=mode == "ANY" or read_text(config, "responseMimeType") not in ("", "text/plain"),
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
    wrapped = read_object(_read_fields(body), "generateContentRequest")
    return GoogleDialect(stream=False).read_request(wrapped or body, cache)


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


def _read_fields(value: Any) -> Any:
    """JSON with the names of fields in one of their two spellings, `maxOutputTokens`, and without those of null."""
    if isinstance(value, list):
        return [_read_fields(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    named = ((_spell(name), field) for name, field in value.items() if field is not None)
    return {name: field if name in _FREE else _read_fields(field) for name, field in named}


def _spell(name: str) -> str:
    return _UNDERSCORE.sub(lambda match: match[1].upper(), name)


def _read_tools(tools: Sequence[Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """The functions, and the kinds of tools that run at Google, which the policy is not shown."""
    functions, left_out = [], []
    for index, tool in enumerate(tools):
        require(isinstance(tool, Mapping), "must be an object", f"tools.{index}")
        left_out += [name for name in tool if name != "functionDeclarations"]
        for one in read_list(tool, "functionDeclarations"):
            named = isinstance(one, Mapping) and read_text(one, "name")
            require(named, "needs a function's name", f"tools.{index}")
            schema = read_object(one, "parametersJsonSchema") or _lower_types(read_object(one, "parameters")) or None
            functions.append(make_tool(one["name"], read_text(one, "description"), schema))
    return tuple(functions), tuple(left_out)


def _lower_types(schema: Any) -> Any:
    """A schema of Google's, whose types are in capitals, as JSON Schema."""
    if isinstance(schema, list):
        return [_lower_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    read = {_spell(name): value for name, value in schema.items()}
    for name, value in read.items():
        if name == "type" and isinstance(value, str):
            read[name] = value.lower()
        elif name in ("properties", "$defs", "defs") and isinstance(value, Mapping):
            read[name] = {key: _lower_types(one) for key, one in value.items()}
        elif name in ("items", "anyOf", "prefixItems", "additionalProperties"):
            read[name] = _lower_types(value)
    return read


def _read_system(body: Mapping[str, Any]) -> list[Message]:
    content = body.get("systemInstruction")
    is_text = isinstance(content, str)
    parts = [{"text": content}] if is_text else read_list(read_object(body, "systemInstruction"), "parts")
    text = "\n".join(read_text(part, _find_kind(part, ("text",), "systemInstruction")) for part in parts)
    return [{"role": "system", "content": text}] if text else []


def _find_kind(part: Any, kinds: Sequence[str], where: str) -> str:
    """The field that tells what a part is."""
    require(isinstance(part, Mapping), "must be objects", f"{where}.parts")
    found: list[str] = [name for name in part if name in _PARTS]
    require(len(found) == 1, f"a part must have one of {', '.join(kinds)}", where)
    refuse(found[0] not in kinds, f"parts with {found[0]} are not supported here", where)
    require(isinstance(part.get("thought", False), bool), "must be true or false", "thought")
    return found[0]


def _read_content(content: Any, where: str) -> Iterator[Message]:
    """The messages of one content: results of functions are messages of their own."""
    require(isinstance(content, Mapping), "must be an object", where)
    content = _read_fields(content)
    role, parts = content.get("role", "user"), read_list(content, "parts")
    require(role in ("user", "model", "function"), "must be user or model", f"{where}.role")
    is_turn = role == "model" and "parts" in content  # Which is empty if its thoughts were all.
    require(parts or is_turn, "must be a list of at least one part", f"{where}.parts")
    if role == "model":
        yield _read_turn(parts, where)
        return
    rest = []
    for part in parts:
        if _find_kind(part, _USER_PARTS, where) == "functionResponse":
            yield _read_result(read_object(part, "functionResponse"), where)
        else:
            rest.append(_read_part(part, where))
    if not all(part["type"] == "text" for part in rest):
        yield {"role": "user", "content": rest}
    elif rest:
        yield {"role": "user", "content": "".join(part["text"] for part in rest)}


def _read_turn(parts: Sequence[Any], where: str) -> Message:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for part in parts:
        if _find_kind(part, _MODEL_PARTS, where) == "text":
            (thoughts if part.get("thought") else texts).append(read_text(part, "text"))
            continue
        call = read_object(part, "functionCall")
        require(name := read_text(call, "name"), "needs a function's name", f"{where}.functionCall")
        id = read_text(call, "id") or f"number_{len(calls)}"
        calls.append(build_call(id, name, write_arguments(dict(read_object(call, "args")))))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _read_result(result: Mapping[str, Any], where: str) -> Message:
    """A result: a text, or all of it as JSON; with its images, if it has any. One without an id has its name."""
    response, id, name = read_object(result, "response"), read_text(result, "id"), read_text(result, "name")
    require(id or name, "needs a function's name", f"{where}.functionResponse")
    key = next(iter(response)) if len(response) == 1 else ""
    is_text = key in _ONE_TEXT and isinstance(response[key], str)
    text = response[key] if is_text else json.dumps(dict(response), ensure_ascii=False)
    parts = read_list(result, "parts")
    images = [_read_part(part, where) for part in parts if _find_kind(part, ("inlineData",), where)]
    content = [{"type": "text", "text": text}, *images] if images else text
    return {"role": "tool", "tool_call_id": id, "content": content} | ({} if id else {"name": name})


def _read_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "text" in part:
        return {"type": "text", "text": read_text(part, "text")}
    data = read_object(part, "inlineData")
    kind = read_text(data, "mimeType") or "image/png"
    return make_image(f"data:{kind};base64,{read_text(data, 'data')}", where)
