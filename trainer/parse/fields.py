"""Arguments written as fields are text; only the tool's own schema can say which of them is more than that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import EMPTY

from .written import Malformed, end_of, spaced

_MAX_STEPS = 8
"""References and choices are followed this far: schemas come from strangers."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""How templates print these; they are looked up, never evaluated."""
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def arguments_of(fields: Sequence[tuple[str, str]], parameters: Mapping[str, Any] | None) -> str:
    """One JSON object of these names and texts; without a schema, every value is a string."""
    return "{" + ", ".join(f"{_dumped(name)}: {_value(name, text, parameters)}" for name, text in fields) + "}"


def fields_of(arguments: str) -> list[tuple[str, str]]:
    """The other way: the members of a JSON object, each as the text that a field holds."""
    value = json.loads(arguments)
    return [(name, item if isinstance(item, str) else _dumped(item)) for name, item in value.items()]


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value(name: str, text: str, parameters: Mapping[str, Any] | None) -> str:
    schema = _schema_of(name, parameters)
    if schema is None or parameters is None:
        return _dumped(text)
    kinds = _kinds(schema, parameters, _MAX_STEPS)
    written = text.strip()
    if kinds & {"boolean", "null"}:
        written = _WORDS.get(written, written)
    kind = _kind(written)
    if kind is None or (kinds and kind not in kinds) or (kind == "string" and "string" in kinds):
        return _dumped(text)
    return written


def _schema_of(name: str, parameters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    properties = (parameters or EMPTY).get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    if found is None:
        found = (parameters or EMPTY).get("additionalProperties")
    return found if isinstance(found, Mapping) else None


def _kind(text: str) -> str | None:
    """What the text is as JSON; None where it is none."""
    try:
        if not text or spaced(text, end_of(text, 0)) != len(text):
            return None
    except Malformed:
        return None
    return _KINDS.get(text[0], "number")


def _kinds(schema: object, root: Mapping[str, Any], steps: int) -> set[str]:
    """The JSON types that a schema takes; empty where it does not say."""
    if not isinstance(schema, Mapping) or not steps:
        return set()
    found = {str(kind) for kind in _listed(schema.get("type"))}
    found |= {kind for value in _listed(schema.get("enum")) if (kind := _kind(_dumped(value)))}
    for word in ("anyOf", "oneOf", "allOf"):
        for choice in _listed(schema.get(word)):
            found |= _kinds(choice, root, steps - 1)
    if isinstance(reference := schema.get("$ref"), str):
        found |= _kinds(_at(root, reference), root, steps - 1)
    return found | ({"number"} if "integer" in found else set())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _at(root: Mapping[str, Any], reference: str) -> object:
    """What a local reference points at."""
    place: object = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
