"""A schema that is nothing but a way back to itself says nothing, and whoever follows it never arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_SAME_PLACE_MANY = ("allOf", "anyOf", "oneOf")
_SAME_PLACE_ONE = ("not", "if", "then", "else")


def loop(schema: Mapping[str, Any]) -> str | None:
    """The reference by which a schema comes back to itself without descending into the value, or None.

    Recursion through `properties` or `items` is well and good: there every step uses up some of the value.
    """
    done: set[int] = set()
    for node in _nodes(schema):
        if (found := _back(schema, node, done)) is not None:
            return found
    return None


def _nodes(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _back(schema: Mapping[str, Any], start: Mapping[str, Any], done: set[int]) -> str | None:
    """Depth first over schemas that judge the same value; `done` lead nowhere back."""
    path: set[int] = set()
    stack: list[tuple[Mapping[str, Any], str, bool]] = [(start, "", False)]
    while stack:
        node, via, left = stack.pop()
        if left:
            path.discard(id(node))
            done.add(id(node))
        elif id(node) in path:
            return via
        elif id(node) not in done:
            path.add(id(node))
            stack.append((node, via, True))
            stack.extend((other, how or via, False) for other, how in _same_place(schema, node))
    return None


def _same_place(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    reference = node.get("$ref")
    if isinstance(reference, str) and isinstance(target := _resolved(schema, reference), Mapping):
        yield target, reference
    for key in _SAME_PLACE_MANY:
        branches = node.get(key)
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, Mapping):
                yield branch, ""
    for key in _SAME_PLACE_ONE:
        if isinstance(branch := node.get(key), Mapping):
            yield branch, ""


def _resolved(schema: Mapping[str, Any], reference: str) -> Any:
    """Pointers within the document; whatever else a reference can be is for the checker to refuse."""
    if not reference.startswith("#"):
        return None
    node: Any = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(step)
        elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node
