"""OpenAI's strict mode: a schema said again under its rules, and the answers to it said as the owner meant."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any


def strict(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same schema under OpenAI's strict rules, or None where they cannot express it."""
    schema = deepcopy(dict(parameters))
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    try:
        if "anyOf" in schema or "oneOf" in schema:
            return None
        closed: dict[str, Any] = _strict(schema)
    except (_NotStrict, RecursionError):
        return None
    return closed


class _NotStrict(Exception):
    """An open object or another shape that strict mode has no words for."""


_UNSUPPORTED = ("oneOf", "not", "if", "then", "else", "patternProperties", "dependentSchemas", "propertyNames")


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    if any(word in node for word in _UNSUPPORTED):
        raise _NotStrict
    node = _merged(node)
    if "$ref" in node and "$defs" not in node:
        return {"$ref": node["$ref"]}
    if node.get("type") == "object" or "properties" in node:
        _close(node)
    for word in {"items", "anyOf", "prefixItems"} & node.keys():
        node[word] = _strict(node[word])
    for word in {"$defs", "definitions"} & node.keys():
        node[word] = {name: _strict(schema) for name, schema in node[word].items()}
    node.pop("default", None)
    return node


def _merged(node: dict[str, Any]) -> dict[str, Any]:
    """A lone `allOf` says the same without the word; several do not."""
    if "allOf" not in node:
        return node
    choices = node.pop("allOf")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise _NotStrict
    return {**node, **choices[0]}


def _close(node: dict[str, Any]) -> None:
    """Every property required, optional ones nullable, nothing beside them."""
    if node.get("additionalProperties", False) not in (False, None) or "properties" not in node:
        raise _NotStrict
    required = set(node.get("required", ()))
    node["properties"] = {
        name: _strict(schema) if name in required else _nullable(_strict(schema))
        for name, schema in node["properties"].items()
    }
    node["required"] = list(node["properties"])
    node["additionalProperties"] = False


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return schema if kind == "null" else schema | {"type": [kind, "null"]}
    if isinstance(kind, list):
        return schema if "null" in kind else schema | {"type": [*kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def drop_nulls(arguments: Any, parameters: Mapping[str, Any]) -> Any:
    """Takes back the nulls that strict mode made a policy write for what it left out."""
    if not isinstance(arguments, dict):
        return arguments
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    kept = {}
    for name, value in arguments.items():
        schema = properties.get(name)
        if value is None and schema is not None and name not in required and not _takes_null(schema):
            continue
        kept[name] = drop_nulls(value, schema) if isinstance(schema, Mapping) else value
    return kept


def _takes_null(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    if kind is not None:
        return "null" in (kind if isinstance(kind, list) else [kind])
    choices = schema.get("anyOf") or schema.get("oneOf")
    return any(_takes_null(choice) for choice in choices) if choices else "enum" not in schema
