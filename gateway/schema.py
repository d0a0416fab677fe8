"""A tool's schema is its owner's: we read it, check arguments by it and rename around it, but never rewrite it.

Both sides are hostile input: schemas come from third parties, arguments from a policy. So no reference is ever
fetched, a pattern's search is bounded, and so is nesting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NoReturn

import jsonschema_rs

MAX_DEPTH = 64
"""Deeper schemas are refused: no person wrote them, and validators recurse."""
MAX_ERRORS = 5
"""More mistakes than this are not listed: one message should be readable."""
NAME_LENGTH = 64
"""OpenAI's limit for a function name."""


class SchemaError(ValueError):
    """A schema that cannot be used, with the reason."""


class Checker:
    """Checks the arguments of one tool, and says in the policy's words how to mend them."""

    __slots__ = ("_parameters", "_validator")

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        _refuse_deep(parameters)
        self._parameters = parameters
        try:
            self._validator = jsonschema_rs.validator_for(
                dict(parameters),
                retriever=_refuse_remote,
                pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000),
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
            raise SchemaError(f"not a usable JSON Schema: {_first_line(error)}") from error

    def mistake(self, arguments: str) -> str | None:
        """What the policy should read about its mistake, or None where there is none."""
        try:
            value = _decode(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"The arguments are not valid JSON ({_first_line(error)}). Write one JSON object."
        if not isinstance(value, dict):
            return f"The arguments must be one JSON object, not {_kind(value)}."
        try:
            return None if self._validator.is_valid(value) else self._mend(value)
        except (ValueError, RecursionError) as error:
            return f"The arguments cannot be checked ({_first_line(error)}). Write simpler ones."

    def _mend(self, value: dict[str, Any]) -> str:
        errors = []
        for error in self._validator.iter_errors(value):
            path = ".".join(str(step) for step in error.instance_path)
            errors.append(f"- {path + ': ' if path else ''}{_clip(error.message)}")
            if len(errors) == MAX_ERRORS:
                break
        return (
            "The arguments do not fit the tool's schema:\n"
            + "\n".join(errors)
            + f"\nExpected: {outline(self._parameters)}"
        )


def outline(parameters: Mapping[str, Any]) -> str:
    """The fields in a line, because a schema is longer than a reader's patience."""
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    fields = [
        f"{name}: {_kind_of(schema)}{'' if name in required else ' (optional)'}" for name, schema in properties.items()
    ]
    return _clip(f"{{{', '.join(fields)}}}", 600)


def parse_object(arguments: str) -> dict[str, Any]:
    """Arguments that were checked before; an empty text is no arguments."""
    value: dict[str, Any] = json.loads(arguments or "{}")
    return value


def _refuse_remote(uri: str) -> NoReturn:
    raise ValueError(f"{uri} lies outside the schema, and nothing is fetched")


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _refuse_deep(schema: object) -> None:
    """Walks level by level, so that the check itself cannot run out of stack."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise SchemaError(f"nested deeper than {MAX_DEPTH} levels")


def _children(node: object) -> Iterable[object]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list) else ()


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _kind_of(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return " | ".join(json.dumps(choice) for choice in schema["enum"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list):
        return " | ".join(dict.fromkeys(_kind_of(choice) for choice in choices))
    kind = schema.get("type", "any")
    return " | ".join(str(one) for one in kind) if isinstance(kind, list) else str(kind)


def _first_line(error: BaseException) -> str:
    return _clip((str(error) or type(error).__name__).splitlines()[0])


def _clip(text: str, most: int = 240) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


_UNSAFE = re.compile(r"[^a-zA-Z0-9_-]")


def safe_name(name: str) -> str:
    """The name an OpenAI client accepts: unchanged where it can be, otherwise marked with a hash of the original.

    The hash makes the map collision-free without knowing the other names, so it is the same in every process.
    """
    cleaned = _UNSAFE.sub("_", name)
    if cleaned == name and 0 < len(name) <= NAME_LENGTH:
        return name
    mark = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{cleaned[: NAME_LENGTH - len(mark) - 1]}_{mark}"
