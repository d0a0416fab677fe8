"""Values that calls use and results hold: each with the key under which it was seen, and the split it belongs to."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any

Scalar = str | int | float
Path = tuple[str | int, ...]
MAX_TEXT = 20_000
"""Characters of a result that are read for values."""
MAX_LEAVES = 400
MAX_LINE = 200
MAX_VALUE = 60
"""Characters of a value."""
HELD_OUT_SHARE = 5
"""One value in this many belongs to held-out tasks."""
_SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "za", "fe", "gu", "pa", "do", "xi", "wy")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_LABELLED = re.compile(r"\s*(?:\d+[.:]\s*)?([A-Za-z][\w -]{0,30}?)\s*[:=]\s*(\S.*?)\s*")
_LISTED = re.compile(r"\[(FILE|DIR)\] (.+)")
ALIASES = (
    {"path", "file", "filename", "dir", "directory", "folder", "source", "destination", "repo"},
    {"name", "entity", "title", "key", "from", "to", "label"},
    {"id", "number", "index"},
    {"content", "text", "observation", "description", "body", "message", "note", "insight"},
)
"""Words of keys that often mean the same."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value with the key that it was seen under, and where, if a step of the chain gave it."""

    value: Scalar
    key: str
    step: int | None = None
    path: Path = ()

    @property
    def text(self) -> str:
        return str(self.value)


def split_of(value: Scalar) -> str:
    """The split whose tasks may have a value: `train` or `held_out`."""
    return "train" if sha256(f"task value {value}".encode()).digest()[0] % HELD_OUT_SHARE else "held_out"


def parse_result(text: str, structured: Any = None) -> Any:
    """A result as a value: the structured one, JSON or a Python literal where it is one; else labels, or its text.

    A structured result that only wraps the text, as `{"content": TEXT}`, is read as the text.
    """
    if isinstance(structured, Mapping) and structured.keys() == {"result"}:
        structured = structured["result"]
    if isinstance(structured, Mapping) and len(structured) == 1 and _is_text(next(iter(structured.values())), text):
        structured = None
    if isinstance(structured, Mapping | list) and structured:
        return structured
    text = text[:MAX_TEXT]
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            if isinstance(value, list | dict):
                return value
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return _parse_lines(text)


def _is_text(value: Any, text: str) -> bool:
    return isinstance(value, str) and value.strip() == text.strip()


def reports_error(value: Any) -> bool:
    """Whether a result says that the call failed, though the protocol does not: `{"status": "error"}`, `Error: ...`."""
    if isinstance(value, list):
        value = value[0] if value else ""
    if isinstance(value, str):
        return value.lstrip().lower().startswith(("error", "fatal:"))
    if not isinstance(value, Mapping):
        return False
    is_refused = value.get("success") is False or value.get("ok") is False
    return is_refused or bool(value.get("error")) or str(value.get("status")).lower() in ("error", "failed", "failure")


def _parse_lines(text: str) -> Any:
    all_lines = text.rstrip().splitlines()
    lines = [line for line in all_lines if line.strip()]
    listed = [match for line in lines if (match := _LISTED.fullmatch(line.strip()))]
    if listed and len(listed) == len(lines):
        return {f"[{kind}] names": [match[2] for match in listed if match[1] == kind] for kind in ("FILE", "DIR")}
    labelled = [match for line in lines if (match := _LABELLED.fullmatch(line))]
    if len(labelled) == len(lines) and len({match[1] for match in labelled}) == len(lines) > 0:
        return {match[1].strip(): match[2] for match in labelled}
    return all_lines if len(lines) > 1 else text.strip()


def leaves(value: Any, key: str = "", path: Path = ()) -> Iterator[tuple[str, Path, Scalar]]:
    """The scalars in a value with their nearest key and their paths, at most MAX_LEAVES."""
    stack: list[tuple[Any, str, Path]] = [(value, key, path)]
    for _ in range(10 * MAX_LEAVES):
        if not stack:
            return
        item, name, place = stack.pop()
        if isinstance(item, Mapping):
            stack.extend((item[one], str(one), (*place, str(one))) for one in reversed(list(item)))
        elif isinstance(item, list | tuple):
            stack.extend((item[at], name, (*place, at)) for at in reversed(range(min(len(item), MAX_LEAVES))))
        elif isinstance(item, str | int | float) and not isinstance(item, bool):
            if is_usable(item):
                yield name, place, item
            if isinstance(item, str) and (inside := read_text(item)):
                stack.append((inside, name, place))


@lru_cache(maxsize=1024)
def read_text(text: str) -> list[dict[str, str]] | dict[str, str] | None:
    """What is in a text: the rows of a Markdown table by its heads, or the value of a line such as `code: 12`."""
    if (match := _LABELLED.fullmatch(text[:MAX_LINE])) and not match[2].startswith("//"):
        return {match[1].strip(): match[2]}
    lines = [line.strip() for line in text[:MAX_TEXT].splitlines()]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    if len(rows) < 3 or set("".join(rows[1])) - set("-: "):
        return None
    return [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]


def is_usable(value: Scalar) -> bool:
    """Whether a value can stand in a question, and be written as an answer: no heading, and no word for yes or no."""
    text = str(value)
    is_name = bool(text.strip()) and not text.endswith(":") and text.lower() not in ("true", "false", "null", "none")
    return is_name and len(text) <= MAX_VALUE and text.isprintable() and "####" not in text


def look_up(value: Any, path: Path) -> Any:
    """The part of a value at a path; None if there is none."""
    for step in path:
        try:
            holder: Any = (read_text(value) or {}) if isinstance(value, str) else value
            value = holder[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def name_words(name: str) -> set[str]:
    """The words of a name, in lower case and in the singular."""
    return {word.lower().removesuffix("s") for word in _WORDS.findall(name)}


def key_words(key: str) -> set[str]:
    """The words of a key, in lower case and in the singular, with words that mean the same."""
    words = name_words(key)
    return words.union(*(group for group in ALIASES if words & group)) if words else words


def key_fit(wanted: str, seen: str) -> int:
    """How well a value seen under a key fits a parameter: 2 for the same name, 1 for related words, 0 otherwise."""
    if _letters(wanted) == _letters(seen):
        return 2
    return int(bool(key_words(wanted) & key_words(seen)))


def _letters(key: str) -> str:
    return "".join(filter(str.isalnum, key)).lower()


def fresh_word(draw: Random) -> str:
    """A word that is in no state."""
    return "".join(draw.choice(_SYLLABLES) for _ in range(draw.randint(3, 4))).capitalize()


FORMATS = {
    "date": "2031-{month:02}-{day:02}",
    "date-time": "2031-{month:02}-{day:02}T{hour:02}:00:00Z",
    "time": "{hour:02}:{day:02}:00",
    "email": "{word}@example.com",
    "uri": "https://example.com/{word}",
    "url": "https://example.com/{word}",
}
"""Texts of the formats that a schema may ask for."""


def fresh_value(
    kind: str, key: str, split: str, draw: Random, bounds: tuple[int, int] = (1, 9999), form: str = ""
) -> Scalar:
    """A new value of a split; a text in a format, if it has to be."""
    for _ in range(200):
        value: Scalar
        if kind in ("integer", "number"):
            value = draw.randint(*bounds)
        elif form in FORMATS:
            numbers = {"month": draw.randint(1, 12), "day": draw.randint(1, 28), "hour": draw.randint(0, 23)}
            value = FORMATS[form].format(word=fresh_word(draw).lower(), **numbers)
        elif key_words(key) & ALIASES[3]:
            value = f"{fresh_word(draw)} {fresh_word(draw).lower()}"
        else:
            value = fresh_word(draw)
        if split_of(value) == split:
            break
    return value


def derived_value(known: str, split: str, draw: Random) -> str:
    """A known value with its last name replaced by a new one, such as another file in the same folder."""
    head, name = known[: known.rfind("/") + 1], known[known.rfind("/") + 1 :]
    ending = name[name.rfind(".") :] if "." in name else ""
    for _ in range(200):
        value = f"{head}{fresh_word(draw).lower()}{ending}"
        if split_of(value) == split:
            break
    return value


def known_values(values: Sequence[Value], key: str, kind: str, split: str) -> list[Value]:
    """The values that may fit a parameter, of a split: those of the same name first."""
    kinds: tuple[type, ...] = (str,) if kind == "string" else (int, float)
    usable = (value for value in values if isinstance(value.value, kinds) and split_of(value.value) == split)
    fits = [(fit, value) for value in usable if (fit := key_fit(key, value.key))]
    return [value for _, value in sorted(fits, key=lambda one: -one[0])]
