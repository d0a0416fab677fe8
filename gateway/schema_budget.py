"""Budgets of JSON Schemas: what a schema may cost to compile, and how many steps a check of one value takes.

A small schema can ask for an exponential number of steps: each level of `anyOf` over `$ref` doubles them (20 levels in
1,400 bytes take 6 ms, 30 take 6 s). Steps are therefore counted before a validator runs, which cannot be interrupted
and holds the event loop. To check everything in a child process instead would cost 172 us of processor time and 1 ms in
place of 32 us.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_VALUES = 5_000
"""Objects, lists and scalars in one schema."""
MAX_EXPANSIONS = 2_000
"""Subschemas that apply to one value, each `$ref` followed."""
MAX_REF_DEPTH = 64
"""Subschemas that apply to one value, one inside the other."""
MAX_PATTERNS, MAX_PATTERN_LENGTH = 100, 10_000
"""Regular expressions in one schema, and their characters together."""
MIN_PATTERN_SIZE, MAX_PATTERN_SIZE, ALL_PATTERNS_SIZE = 30_000, 2_000_000, 3_000_000
"""Compiled regular expressions, in bytes: compiling takes time in proportion."""
PATTERN_STEPS, BACKTRACKING_STEPS = 10, 250
"""What a regular expression may cost on one short string, without and with look-around or back references."""

IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
IN_PLACE = ("not", "if", "then", "else")
IN_PLACE_MAPPINGS = ("dependentSchemas", "dependencies")
_OPAQUE = ("$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems")
"""Keywords whose steps are not counted."""
_MULTIPLYING = {"$ref", *_OPAQUE}
MAX_PLAIN_NODES = 200


_BACKTRACKS = re.compile(r"\\(?:[1-9gk])|\(\?(?!:|P?<[A-Za-z_])")


def find_excess(schema: Mapping[str, Any]) -> str | None:
    """Which budget a schema exceeds, in words; None if it exceeds none. The nesting must have been checked."""
    nodes, values, patterns = _survey(schema)
    if values > MAX_VALUES:
        return f"it has more than {MAX_VALUES} values"
    if len(patterns) > MAX_PATTERNS or sum(map(len, patterns)) > MAX_PATTERN_LENGTH:
        return f"it has more than {MAX_PATTERNS} patterns, or more than {MAX_PATTERN_LENGTH} characters in patterns"
    measured: dict[int, tuple[int, int]] = {}
    for node in nodes:
        expansions, depth = _measure(schema, node, measured)
        if expansions > MAX_EXPANSIONS:
            return f"more than {MAX_EXPANSIONS} of its subschemas apply to one value, as `anyOf` and `$ref` multiply"
        if depth > MAX_REF_DEPTH:
            return f"more than {MAX_REF_DEPTH} of its subschemas, one inside the other, apply to one value"
    return None


def is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is small and has nothing that multiplies steps, so that they need not be counted."""
    nodes, _, patterns = _survey(schema)
    return len(nodes) <= MAX_PLAIN_NODES and not patterns and not any(_MULTIPLYING & node.keys() for node in nodes)


def pattern_size_limit(schema: Mapping[str, Any]) -> int:
    """How large each compiled pattern of a schema may become, in bytes: the more there are, the smaller."""
    return max(MIN_PATTERN_SIZE, min(MAX_PATTERN_SIZE, ALL_PATTERNS_SIZE // max(1, len(_survey(schema)[2]))))


def _survey(schema: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], int, list[str]]:
    """The objects in a schema, the number of its values (as far as is allowed), and its patterns."""
    nodes: list[Mapping[str, Any]] = []
    patterns: list[str] = []
    values, stack = 0, [schema]
    while stack and values <= MAX_VALUES:
        node: Any = stack.pop()
        values += 1
        if isinstance(node, Mapping):
            nodes.append(node)
            stack.extend(node.values())
            if isinstance(pattern := node.get("pattern"), str):
                patterns.append(pattern)
            if isinstance(by_pattern := node.get("patternProperties"), Mapping):
                patterns.extend(map(str, by_pattern))
        elif isinstance(node, list):
            stack.extend(node)
    return nodes, values, patterns


def _measure(
    schema: Mapping[str, Any], start: Mapping[str, Any], measured: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """How many subschemas apply to a value with this one, and how deep they lie; a cycle is followed once."""
    entered: set[int] = set()
    stack: list[tuple[Mapping[str, Any], list[Mapping[str, Any]] | None]] = [(start, None)]
    while stack:
        node, inner = stack.pop()
        if inner is not None:
            sizes = [measured.get(id(child), (0, 0)) for child in inner]
            expansions = min(1 + sum(size for size, _ in sizes), MAX_EXPANSIONS + 1)
            measured[id(node)] = expansions, 1 + max((depth for _, depth in sizes), default=0)
        elif id(node) not in measured and id(node) not in entered:
            entered.add(id(node))
            children = [child for child, _ in in_place_subschemas(schema, node)]
            stack.append((node, children))
            stack.extend((child, None) for child in children)
    return measured[id(start)]


def in_place_subschemas(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The subschemas that apply to the same value as `node`, each with the reference that leads to it."""
    reference = node.get("$ref")
    if isinstance(reference, str) and isinstance(target := resolve_ref(schema, reference), Mapping):
        yield target, reference
    for key in IN_PLACE_LISTS:
        branches = node.get(key)
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, Mapping):
                yield branch, ""
    for key in IN_PLACE:
        if isinstance(branch := node.get(key), Mapping):
            yield branch, ""
    for key in IN_PLACE_MAPPINGS:
        branches = node.get(key)
        for branch in branches.values() if isinstance(branches, Mapping) else ():
            if isinstance(branch, Mapping):
                yield branch, ""


def resolve_ref(schema: Mapping[str, Any], reference: str) -> Any:
    """The target of a JSON pointer within the document; None for every other reference."""
    if not reference.startswith("#"):
        return None
    node: Any = schema
    for segment in unquote(reference[1:]).split("/")[1:]:
        segment = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(segment)
        elif isinstance(node, list) and segment.isdigit() and int(segment) < len(node):
            node = node[int(segment)]
        else:
            return None
    return node


def count_steps(schema: Mapping[str, Any], value: Any, limit: int) -> int | None:
    """An upper bound on the subschemas that a check of `value` applies; None if it is over the limit or unknown."""
    steps = 0
    stack: list[tuple[Mapping[str, Any], Any]] = [(schema, value)]
    while stack:
        node, part = stack.pop()
        if not _is_countable(schema, node):
            return None
        steps += 1 + _pattern_steps(node, part)
        if steps + len(stack) > limit:
            return None
        stack.extend((child, part) for child, _ in in_place_subschemas(schema, node))
        stack.extend((child, inner) for child, inner in _inner_checks(node, part) if isinstance(child, Mapping))
    return steps


def _is_countable(schema: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    if any(word in node for word in _OPAQUE):
        return False
    reference = node.get("$ref")
    if reference is None:
        return True
    is_pointer = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    return is_pointer and resolve_ref(schema, reference) is not None


def _pattern_steps(node: Mapping[str, Any], value: Any) -> int:
    if isinstance(value, str):
        return _match_steps(node["pattern"], len(value)) if "pattern" in node else 0
    by_pattern = node.get("patternProperties")
    if isinstance(value, dict) and isinstance(by_pattern, Mapping):
        return sum(_match_steps(pattern, len(key)) for pattern in by_pattern for key in value)
    return 0


def _match_steps(pattern: object, length: int) -> int:
    """Steps of one match: linear in the string, or quadratic where the pattern makes the engine backtrack."""
    if isinstance(pattern, str) and _BACKTRACKS.search(pattern):
        return BACKTRACKING_STEPS + length * length // 200
    return PATTERN_STEPS + length // 100


def _inner_checks(node: Mapping[str, Any], value: Any) -> Iterator[tuple[Any, Any]]:
    """Subschemas with the parts of a value that they may apply to."""
    if isinstance(value, dict):
        yield from _property_checks(node, value)
    elif isinstance(value, list):
        for key in ("items", "prefixItems"):
            if isinstance(by_place := node.get(key), list):
                yield from zip(by_place, value, strict=False)
        for key in ("items", "additionalItems", "contains"):
            if isinstance(child := node.get(key), Mapping):
                yield from ((child, item) for item in value)


def _property_checks(node: Mapping[str, Any], value: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    properties, by_pattern = node.get("properties"), node.get("patternProperties")
    if isinstance(properties, Mapping):
        yield from ((properties[name], item) for name, item in value.items() if name in properties)
    if isinstance(by_pattern, Mapping):
        yield from ((child, item) for child in by_pattern.values() for item in value.values())
    if isinstance(others := node.get("additionalProperties"), Mapping):
        yield from ((others, item) for item in value.values())
    if isinstance(names := node.get("propertyNames"), Mapping):
        yield from ((names, name) for name in value)
