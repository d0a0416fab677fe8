"""Builds the OpenAPI document of the HTTP API from the models that validate its requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp

from gateway.http import api_models
from gateway.http.exchange import Request
from gateway.http.state import AppState
from gateway.version import installed_version

Schema = dict[str, Any]
STREAM = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handler: Callable[[AppState, Request], Awaitable[ASGIApp]]
    summary: str
    response: type[BaseModel] | str
    """A model, or the media types of a response that is not JSON."""
    request: type[BaseModel] | None = None
    status: int = 200
    errors: tuple[int, ...] = ()
    query: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Allowed values by parameter, the default first; `("0",)` means any number from 0 on."""


_ERROR_TEXTS = {
    400: "The body is not JSON, or a header that must be single occurs twice.",
    401: "The token is missing or wrong.",
    403: "The Host or the Origin is not allowed.",
    404: "There is no such session, server, tape or file.",
    405: "The path has no such method.",
    409: "The request is well formed, but the gateway or session does not offer this, or the tape has no such entry.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    422: "A field is invalid.",
    500: "The gateway failed.",
    503: "Too many sessions are open, or something that is needed is down.",
}
_COMMON_ERRORS = (400, 401, 403, 500)


def openapi_document(operations: Sequence[Operation]) -> Schema:
    """The document that GET /openapi.json returns."""
    models = {
        model
        for operation in operations
        for model in (operation.request, operation.response)
        if isinstance(model, type)
    }
    modes = [
        (model, "validation") for model in sorted(models | {api_models.ErrorResponse}, key=lambda model: model.__name__)
    ]
    _, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation_schema(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mtrl gateway",
            "version": installed_version(),
            "description": "Native tools, MCP servers and feedback interactions behind one function-schema interface.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation_schema(operation: Operation) -> Schema:
    schema: Schema = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "parameters": _parameters(operation),
    }
    if operation.request is not None:
        schema["requestBody"] = {"required": True, "content": _json_content(_request_schema(operation.request))}
    schema["responses"] = {str(operation.status): {"description": "Done.", "content": _response_content(operation)}}
    for status in sorted({*operation.errors, *_COMMON_ERRORS}):
        content = _json_content(_ref(api_models.ErrorResponse))
        schema["responses"][str(status)] = {"description": _ERROR_TEXTS[status], "content": content}
    return schema


def _operation_id(operation: Operation) -> str:
    words = [word.strip("{}").removesuffix(".json") for word in operation.path.split("/") if word and word != "v1"]
    return "_".join([operation.method.lower(), *words])


def _parameters(operation: Operation) -> list[Schema]:
    query = [
        {"name": name, "in": "query", "schema": {"type": "string", "enum": list(words), "default": words[0]}}
        for name, words in operation.query.items()
    ]
    id_schema = {"type": "string", "minLength": 1}
    path = [{"name": "id", "in": "path", "required": True, "schema": id_schema}] if "{id}" in operation.path else []
    return [*path, *query]


def _request_schema(model: type[BaseModel]) -> Schema:
    """The body's schema; calls may also be sent as a bare list."""
    if model is not api_models.CallsRequest:
        return _ref(model)
    return {"anyOf": [_ref(model), {"type": "array", "items": _ref(api_models.Call)}]}


def _response_content(operation: Operation) -> Schema:
    if isinstance(operation.response, str):
        schema = {"type": "object"} if operation.response == "application/json" else {"type": "string"}
        return {kind: {"schema": schema} for kind in operation.response.split(", ")}
    content = _json_content(_ref(operation.response))
    return content | {STREAM: {"schema": {"type": "string"}}} if "hold" in operation.query else content


def _json_content(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _ref(model: type[BaseModel]) -> Schema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
