"""Tool schemas: validation of a call's arguments, names that OpenAI clients accept, and OpenAI's strict mode.

Schemas come from third parties and arguments from a policy, so both are untrusted: remote references are never
fetched, and regex backtracking and nesting are bounded. A tool's own schema is never modified.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from hashlib import sha256
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import jsonschema_rs
from pydantic_core import from_json

from gateway.schema_budget import count_steps, find_excess, is_plain, pattern_size_limit

MAX_DEPTH = 64
"""Deeper schemas are refused, because validators recurse."""
QUICK_LENGTH = 65_536
"""Longer arguments are not checked on the event loop."""
PLAIN_LENGTH = 4_096
"""Shorter ones are checked against a plain schema without counting steps."""
QUICK_STEPS = 5_000
"""Nor are those whose check may take more steps than this."""
QUICK_ERROR_CHARACTERS = 4_000_000
"""Nor are their errors listed there if the messages may take more; each step may write one about the whole value."""
MAX_ERRORS = 5
"""Further errors are not listed, so that the message stays readable."""
NAME_LENGTH = 64
"""OpenAI's limit for a function name."""


class SchemaError(ValueError):
    """A schema that cannot be used, with the reason."""


class SlowCheckError(Exception):
    """A check that may take too long for the event loop."""


class ArgumentChecker:
    """Validates the arguments of one tool, and explains errors to the policy.

    A schema over its budget is refused. How long a check takes depends on the arguments, too: `explain_quickly` is for
    the event loop, and `explain_error` for where nothing else waits.
    """

    __slots__ = ("__weakref__", "_is_plain", "_length", "_validator", "parameters")

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        _check_depth(parameters)
        if (excess := find_excess(parameters)) is not None:
            raise SchemaError(f"over the budget of a schema: {excess}")
        self.parameters = parameters
        self._is_plain = is_plain(parameters)
        self._length: int | None = None
        try:
            self._validator = jsonschema_rs.validator_for(
                dict(parameters),
                retriever=_refuse_remote,
                pattern_options=jsonschema_rs.FancyRegexOptions(
                    backtrack_limit=10_000, size_limit=pattern_size_limit(parameters)
                ),
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
            raise SchemaError(f"not a usable JSON Schema: {_first_line(error)}") from error

    def explain_error(self, arguments: str) -> str | None:
        """A message for the policy about what is wrong with its arguments; None if they are valid."""
        return self._explain(arguments, is_quick=False)

    def explain_quickly(self, arguments: str) -> str | None:
        """The same within a budget of steps; raises `SlowCheckError` where the check may take more."""
        if len(arguments) > QUICK_LENGTH:
            raise SlowCheckError
        return self._explain(arguments, is_quick=True)

    def _explain(self, arguments: str, *, is_quick: bool) -> str | None:
        try:
            value = _decode(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"The arguments are not valid JSON ({_first_line(error)}). Write one JSON object."
        if not isinstance(value, dict):
            kind = _JSON_TYPES.get(type(value), "null")
            return f"The arguments must be one JSON object, not {kind}."
        try:
            if is_quick and not (self._is_plain and len(arguments) <= PLAIN_LENGTH):
                self._count_steps(value)
            if self._validator.is_valid(value):
                return None
            if is_quick and self._count_steps(value) * (len(arguments) + self._schema_length) > QUICK_ERROR_CHARACTERS:
                raise SlowCheckError
            return self._list_errors(value)
        except (ValueError, RecursionError) as error:
            return f"The arguments cannot be checked ({_first_line(error)}). Write simpler ones."

    def _count_steps(self, value: dict[str, Any]) -> int:
        steps = count_steps(self.parameters, value, QUICK_STEPS)
        if steps is None:
            raise SlowCheckError
        return steps

    @property
    def _schema_length(self) -> int:
        if self._length is None:
            self._length = len(json.dumps(self.parameters))
        return self._length

    def _list_errors(self, value: dict[str, Any]) -> str:
        errors = []
        for error in self._validator.iter_errors(value):
            location = ".".join(str(step) for step in error.instance_path)
            errors.append(f"- {location + ': ' if location else ''}{_shorten(error.message)}")
            if len(errors) == MAX_ERRORS:
                break
        return (
            "The arguments do not fit the tool's schema:\n"
            + "\n".join(errors)
            + f"\nExpected: {summarize_parameters(self.parameters)}"
        )


_checkers: WeakValueDictionary[int, ArgumentChecker] = WeakValueDictionary()
"""By the identity of their parameters, the checkers that something holds."""


def checker_for(parameters: Mapping[str, Any]) -> ArgumentChecker:
    """The checker of these very parameters, compiled once: a listing does so in a thread, before tools are offered."""
    checker = _checkers.get(id(parameters))
    if checker is None or checker.parameters is not parameters:
        checker = _checkers[id(parameters)] = ArgumentChecker(parameters)
    return checker


def summarize_parameters(parameters: Mapping[str, Any]) -> str:
    """The parameters in one line: `{name: type, other: type (optional)}`."""
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    fields = [
        f"{name}: {_schema_type(schema, parameters.get('$defs'))}{'' if name in required else ' (optional)'}"
        for name, schema in properties.items()
    ]
    return _shorten(f"{{{', '.join(fields)}}}", 600)


def parse_arguments(arguments: str) -> dict[str, Any]:
    """Parses arguments that have been validated; an empty text means no arguments."""
    value: dict[str, Any] = _decode(arguments or "{}")
    return value


def _refuse_remote(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is outside the schema, and remote references are not fetched")


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_decode_slowly = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _decode(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):  # It is bad, or has half a character, which only the standard library reads.
        return _decode_slowly(text)


def _check_depth(schema: object) -> None:
    """Checks the nesting level by level, so that the check itself cannot overflow the stack."""
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


_JSON_TYPES = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}


def _schema_type(schema: object, definitions: object) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(definitions, Mapping) and isinstance(reference := schema.get("$ref"), str):
        return _schema_type(definitions.get(reference.removeprefix("#/$defs/")), None)
    if "enum" in schema:
        return " | ".join(json.dumps(choice) for choice in schema["enum"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list):
        return " | ".join(dict.fromkeys(_schema_type(choice, definitions) for choice in choices))
    kind = schema.get("type", "any")
    return " | ".join(str(name) for name in kind) if isinstance(kind, list) else str(kind)


def _first_line(error: BaseException) -> str:
    return _shorten((str(error) or type(error).__name__).splitlines()[0])


def _shorten(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


_UNSAFE = re.compile(r"[^a-zA-Z0-9_-]")


def safe_name(name: str) -> str:
    """A name that OpenAI clients accept: unchanged if possible, otherwise cleaned and marked with a hash.

    The hash avoids collisions without knowledge of the other names, so the result is the same in every process.
    """
    cleaned = _UNSAFE.sub("_", name)
    if cleaned == name and 0 < len(name) <= NAME_LENGTH:
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{cleaned[: NAME_LENGTH - len(digest) - 1]}_{digest}"


def strict_schema(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema for OpenAI's strict mode, or None if strict mode cannot express it."""
    schema = deepcopy(dict(parameters))
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    try:
        if "anyOf" in schema or "oneOf" in schema:
            return None
        strict: dict[str, Any] = _make_strict(schema)
    except (_NotExpressible, RecursionError):
        return None
    return strict


class _NotExpressible(Exception):
    """An open object or another schema that strict mode cannot express."""


_UNSUPPORTED = ("oneOf", "not", "if", "then", "else", "patternProperties", "dependentSchemas", "propertyNames")


def _make_strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_make_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    if any(word in node for word in _UNSUPPORTED):
        raise _NotExpressible
    node = _merge_all_of(node)
    if "$ref" in node and "$defs" not in node:
        return {"$ref": node["$ref"]}
    if node.get("type") == "object" or "properties" in node:
        _close_object(node)
    for word in {"items", "anyOf", "prefixItems"} & node.keys():
        node[word] = _make_strict(node[word])
    for word in {"$defs", "definitions"} & node.keys():
        node[word] = {name: _make_strict(schema) for name, schema in node[word].items()}
    node.pop("default", None)
    return node


def _merge_all_of(node: dict[str, Any]) -> dict[str, Any]:
    """Merges an `allOf` with one schema into the node; several cannot be merged."""
    if "allOf" not in node:
        return node
    choices = node.pop("allOf")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise _NotExpressible
    return {**node, **choices[0]}


def _close_object(node: dict[str, Any]) -> None:
    """Makes every property required, optional ones nullable, and forbids further properties."""
    if node.get("additionalProperties", False) not in (False, None) or "properties" not in node:
        raise _NotExpressible
    required = set(node.get("required", ()))
    node["properties"] = {
        name: _make_strict(schema) if name in required else _make_nullable(_make_strict(schema))
        for name, schema in node["properties"].items()
    }
    node["required"] = list(node["properties"])
    node["additionalProperties"] = False


def _make_nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return schema if kind == "null" else schema | {"type": [kind, "null"]}
    if isinstance(kind, list):
        return schema if "null" in kind else schema | {"type": [*kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def drop_nulls(arguments: Any, parameters: Mapping[str, Any]) -> Any:
    """Removes the nulls that strict mode makes a policy write for optional arguments."""
    if not isinstance(arguments, dict):
        return arguments
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    result = {}
    for name, value in arguments.items():
        schema = properties.get(name)
        if value is None and schema is not None and name not in required and not _allows_null(schema):
            continue
        result[name] = drop_nulls(value, schema) if isinstance(schema, Mapping) else value
    return result


def _allows_null(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    if kind is not None:
        return "null" in (kind if isinstance(kind, list) else [kind])
    choices = schema.get("anyOf") or schema.get("oneOf")
    return any(_allows_null(choice) for choice in choices) if choices else "enum" not in schema
