"""/openapi.json: the paths as they are served, with the very models that check the requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http import shapes

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    reply: type[BaseModel] | str
    """A model, or the media types of an answer that is not JSON."""
    request: type[BaseModel] | None = None
    status: int = 200
    refusals: tuple[int, ...] = ()
    query: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By name, the words it takes; the first is the default. `0` alone stands for any number from 0 on."""


_BODY = (400, 413, 422)
_HELD = "application/x-ndjson"
_FILES = "text/javascript, text/css, text/html, image/svg+xml"

OPERATIONS = (
    Operation(
        "get",
        "/v1/tools",
        "List the tools as function schemas",
        shapes.Tools,
        refusals=(422,),
        query={"strict": ("false", "true"), "audience": ("policy", "loop", "all"), "form": ("openai", "spec")},
    ),
    Operation(
        "post",
        "/v1/sessions",
        "Open a session for one rollout",
        shapes.Begun,
        shapes.BeginRequest,
        status=201,
        refusals=(*_BODY, 409, 503),
        query={"hold": ("false", "true")},
    ),
    Operation("get", "/v1/sessions/{id}", "Look at a session", shapes.State, refusals=(404,)),
    Operation(
        "delete", "/v1/sessions/{id}", "Close a session and give back what it held", shapes.Closed, refusals=(404,)
    ),
    Operation(
        "post",
        "/v1/sessions/{id}/calls",
        "Run the tool calls of an assistant message",
        shapes.Called,
        shapes.CallsRequest,
        refusals=(*_BODY, 404, 409),
    ),
    Operation(
        "post",
        "/v1/sessions/{id}/feedback",
        "Ask the session's interaction for its next turn",
        shapes.Heard,
        shapes.FeedbackRequest,
        refusals=(*_BODY, 404, 409),
    ),
    Operation(
        "post",
        "/v1/calls",
        "Run calls of pure tools without a session",
        shapes.Called,
        shapes.CallsRequest,
        refusals=(*_BODY, 409, 503),
    ),
    Operation("get", "/v1/live/calls", "Watch calls as they run and end, after the last ones", _HELD),
    Operation("get", "/v1/live/sessions", "List the sessions that are open, by whichever door", shapes.LiveSessions),
    Operation("delete", "/v1/live/sessions/{id}", "Close any session, by its digest", shapes.Closed, refusals=(404,)),
    Operation("get", "/v1/tapes", "List the tapes within reach", shapes.Tapes),
    Operation(
        "get",
        "/v1/tapes/{id}",
        "Look at what is on a tape, session by session",
        shapes.TapeRead,
        refusals=(404, 409, 422),
        query={"from": ("0",)},
    ),
    Operation("get", "/healthz", "How the gateway and its servers are", shapes.Health),
    Operation("get", "/metrics", "Numbers for Prometheus", "text/plain"),
    Operation("get", "/openapi.json", "This document", "application/json"),
    Operation("get", "/docs", "This document for people", "text/html"),
    Operation("get", "/ui", "The page that shows all of this", "text/html"),
    Operation("get", "/ui/{id}", "A file of that page", _FILES, refusals=(404,)),
)

_REFUSALS = {
    400: "The body is not JSON.",
    401: "The token is missing or wrong.",
    403: "The Host or the Origin is not allowed.",
    404: "There is no such session.",
    405: "The path has no such method.",
    409: "Well formed, but the gateway or the session offers no such thing, or its tape does not hold it.",
    413: "The body is too large.",
    422: "A field is wrong.",
    500: "The gateway failed.",
    503: "There is no room, or something that is needed is down.",
}
_ALWAYS = (401, 403, 500)


def document() -> Schema:
    models = {model for one in OPERATIONS for model in (one.request, one.reply) if isinstance(model, type)}
    wanted = [(model, "validation") for model in sorted(models | {shapes.Refused}, key=lambda model: model.__name__)]
    _, schemas = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Schema] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mtrl gateway",
            "version": version("mtrl"),
            "description": "Native tools, MCP servers and feedback interactions behind one function-schema interface.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(one: Operation) -> Schema:
    made: Schema = {"summary": one.summary, "operationId": _id(one), "parameters": _parameters(one)}
    if one.request is not None:
        made["requestBody"] = {"required": True, "content": _json(_request(one.request))}
    made["responses"] = {str(one.status): {"description": "Done.", "content": _content(one)}}
    for status in sorted({*one.refusals, *_ALWAYS}):
        content = _json(_ref(shapes.Refused))
        made["responses"][str(status)] = {"description": _REFUSALS[status], "content": content}
    return made


def _id(one: Operation) -> str:
    words = [word.strip("{}").removesuffix(".json") for word in one.path.split("/") if word and word != "v1"]
    return "_".join([one.method, *words])


def _parameters(one: Operation) -> list[Schema]:
    query = [{"name": name, "in": "query", "schema": _words(words)} for name, words in one.query.items()]
    id_schema = {"type": "string", "minLength": 1}
    path = [{"name": "id", "in": "path", "required": True, "schema": id_schema}] if "{id}" in one.path else []
    return [*path, *query]


def _words(words: tuple[str, ...]) -> Schema:
    if words == ("0",):
        return {"type": "integer", "minimum": 0, "default": 0}
    return {"type": "string", "enum": list(words), "default": words[0]}


def _request(model: type[BaseModel]) -> Schema:
    """Calls may also come as the bare list."""
    if model is not shapes.CallsRequest:
        return _ref(model)
    return {"anyOf": [_ref(model), {"type": "array", "items": _ref(shapes.Call)}]}


def _content(one: Operation) -> Schema:
    if isinstance(one.reply, str):
        schema = {"type": "object"} if one.reply == "application/json" else {"type": "string"}
        return {kind: {"schema": schema} for kind in one.reply.split(", ")}
    content = _json(_ref(one.reply))
    return content | {_HELD: {"schema": {"type": "string"}}} if "hold" in one.query else content


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _ref(model: type[BaseModel]) -> Schema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
