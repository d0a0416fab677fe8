"""Converts arguments written as text fields into JSON, with the types of the tool's schema, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import EMPTY
from trainer.parse.json_scan import MalformedCall, find_value_end, skip_space

_MAX_DEPTH = 8
"""References and alternatives are followed this far, since schemas are untrusted."""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""How templates print these values; looked up, never evaluated."""
_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def build_arguments(fields: Sequence[tuple[str, str]], parameters: Mapping[str, Any] | None) -> str:
    """A JSON object of these names and texts; without a schema, every value is a string."""
    return "{" + ", ".join(f"{_dump(name)}: {_to_json(name, text, parameters)}" for name, text in fields) + "}"


def split_arguments(arguments: str) -> list[tuple[str, str]]:
    """The members of a JSON object as names and texts; the inverse of `build_arguments`."""
    value = json.loads(arguments)
    return [(name, item if isinstance(item, str) else _dump(item)) for name, item in value.items()]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _to_json(name: str, text: str, parameters: Mapping[str, Any] | None) -> str:
    schema = _find_schema(name, parameters)
    if schema is None or parameters is None:
        return _dump(text)
    allowed = _allowed_types(schema, parameters, _MAX_DEPTH)
    value = text.strip()
    if allowed & {"boolean", "null"}:
        value = _PYTHON_WORDS.get(value, value)
    json_type = _json_type(value)
    is_string = json_type == "string" and "string" in allowed
    if json_type is None or (allowed and json_type not in allowed) or is_string:
        return _dump(text)
    return value


def _find_schema(name: str, parameters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    properties = (parameters or EMPTY).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = (parameters or EMPTY).get("additionalProperties")
    return schema if isinstance(schema, Mapping) else None


def _json_type(text: str) -> str | None:
    """The JSON type of the text; None if it is not JSON."""
    try:
        if not text or skip_space(text, find_value_end(text, 0)) != len(text):
            return None
    except MalformedCall:
        return None
    return _TYPES.get(text[0], "number")


def _allowed_types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    types = {str(name) for name in _as_list(schema.get("type"))}
    types |= {name for value in _as_list(schema.get("enum")) if (name := _json_type(_dump(value)))}
    for keyword in ("anyOf", "oneOf", "allOf"):
        for alternative in _as_list(schema.get(keyword)):
            types |= _allowed_types(alternative, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        types |= _allowed_types(_resolve_ref(root, reference), root, depth - 1)
    return types | ({"number"} if "integer" in types else set())


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _resolve_ref(root: Mapping[str, Any], reference: str) -> object:
    """The target of a local reference."""
    target: object = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target
