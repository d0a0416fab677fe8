"""Typed reading of the fields of a request, which may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.types import EMPTY
from mtrl_plugins.agents.policy_request import require


def read_integer(body: Mapping[str, Any], name: str) -> int | None:
    """A positive integer; None if it is missing."""
    value = body.get(name)
    is_integer = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(value is None or is_integer, "must be a positive integer", name)
    return value


def read_number(body: Mapping[str, Any], name: str) -> float | None:
    """A number from 0 on; None if it is missing."""
    value = body.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1000
    require(value is None or is_number, "must be a number from 0 on", name)
    return value


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; an empty one if it is missing."""
    value = body.get(name)
    require(value is None or isinstance(value, Mapping), "must be an object", name)
    return EMPTY if value is None else value


def read_list(body: Mapping[str, Any], name: str) -> list[Any]:
    """A list; an empty one if it is missing."""
    value = body.get(name)
    require(value is None or isinstance(value, list), "must be a list", name)
    return value or []


MOST_TEXTS, LONGEST_TEXT = 16, 200
"""Each is looked for after every token."""


def read_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A few short texts that are not empty: a list of them, or a single one."""
    value = body.get(name)
    texts = [value] if isinstance(value, str) else value or []
    is_valid = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    require(is_valid, "must be a text or a list of texts", name)
    is_short = len(texts) <= MOST_TEXTS and all(len(text) <= LONGEST_TEXT for text in texts)
    require(is_short, f"may be {MOST_TEXTS} texts of {LONGEST_TEXT} characters at most", name)
    return tuple(texts)
