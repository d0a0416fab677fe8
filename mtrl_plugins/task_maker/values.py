"""Values that calls use and results hold: each with the key under which it was seen, and the split it belongs to."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import islice
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


Source = str
"""`fresh`; `named` in the schema; or where values were seen: `known:KEY` in the state, `linked:KEY` in an earlier
result, `derived:KEY` for a new one like a known one."""
OPTIONAL_SHARE = 0.15
SECOND_ITEM_SHARE = 0.1
MAX_DEPTH = 6
LINK_FACTOR = 2.0
"""How much more often a value of an earlier result is taken than another that works as well."""
MAX_GROUPS = 8
"""Keys of values that are tried for a parameter."""


@dataclass
class SourceStatistics:
    """How often each source of values led to a call that worked, by tool and parameter."""

    tried: dict[tuple[str, str, Source], int] = field(default_factory=lambda: defaultdict(int))
    worked: dict[tuple[str, str, Source], int] = field(default_factory=lambda: defaultdict(int))

    def weight(self, tool: str, parameter: str, source: Source) -> float:
        key = (tool, parameter, source)
        return (0.5 + self.worked[key]) / (1 + self.tried[key])

    def record(self, tool: str, used: Mapping[str, Source], *, ok: bool) -> None:
        for parameter, source in used.items():
            self.tried[tool, parameter, source] += 1
            self.worked[tool, parameter, source] += ok

    def tool_weight(self, tool: str) -> float:
        """How well calls of a tool work; a tool that never worked is rarely tried again."""
        return self.weight(tool, "", "call")


@dataclass(frozen=True)
class Written:
    """Arguments with the places whose values come from earlier results, and the sources that were used."""

    arguments: dict[str, Any]
    links: Mapping[Path, Value]
    sources: Mapping[str, Source]
    literals: tuple[Any, ...]
    """The values that are no part of the schema: they belong to a split."""


class ArgumentWriter:
    """Writes the arguments of one call."""

    def __init__(
        self, statistics: SourceStatistics, known: Sequence[Value], split: str, draw: Random, *, explores: bool
    ) -> None:
        """`known` are values of the state and, with a step, of earlier results; an explorer tries all sources alike."""
        self._statistics, self._known, self._split, self._draw = statistics, known, split, draw
        self._explores = explores

    def write(self, tool: str, schema: Mapping[str, Any], examples: Sequence[Mapping[str, Any]] = ()) -> Written:
        self._tool, self._definitions = tool, {**schema.get("$defs", {}), **schema.get("definitions", {})}
        self._links: dict[Path, Value] = {}
        self._sources: dict[str, Source] = {"": "call"}
        self._literals: list[Any] = []
        example = self._draw.choice(list(examples)) if examples else None
        arguments = self._write_object(schema, (), "", 0) if example is None else self._fill(example)
        return Written(arguments, dict(self._links), dict(self._sources), tuple(self._literals))

    def _fill(self, example: Any) -> Any:
        """An example with a value of the state, or a new one, for each `{key}` in its texts."""
        if isinstance(example, Mapping):
            return {key: self._fill(value) for key, value in example.items()}
        if isinstance(example, list):
            return [self._fill(value) for value in example]
        if not isinstance(example, str):
            return example
        parts = example.split("{")
        for at, part in enumerate(parts[1:], 1):
            key, brace, rest = part.partition("}")
            is_name = brace and key.lstrip("+#").isidentifier()
            parts[at] = f"{self._example_value(key)}{rest}" if is_name else "{" + part
        return "".join(parts)

    def _example_value(self, key: str) -> Any:
        name, kind = key.lstrip("+#"), "integer" if key.startswith("#") else "string"
        found = [] if key[0] in "+#" else known_values(self._known, name, kind, self._split)
        found = [value for value in found if key_fit(name, value.key) == key_fit(name, found[0].key)]
        value = self._draw.choice(found).value if found else fresh_value(kind, name, self._split, self._draw)
        self._literals.append(value)
        return value

    def _write(self, schema: Any, path: Path, key: str, depth: int) -> Any:
        schema = self._resolve(schema)
        if "const" in schema:
            return schema["const"]
        if options := schema.get("enum"):
            return self._draw.choice(list(options))
        kind = _kind(schema)
        if kind == "object":
            return self._write_object(schema, path, key, depth)
        if kind == "array":
            least = min(int(schema.get("minItems", 1)), 4)
            count = max(least, 1) + (self._draw.random() < SECOND_ITEM_SHARE)
            return [self._write(schema.get("items", {}), (*path, at), key, depth + 1) for at in range(count)]
        if kind == "boolean":
            return self._draw.random() < 0.5
        return None if kind == "null" else self._scalar(schema, kind, path, key)

    def _write_object(self, schema: Mapping[str, Any], path: Path, key: str, depth: int) -> dict[str, Any]:
        required, written = set(schema.get("required", ())), {}
        for name, inner in schema.get("properties", {}).items() if depth < MAX_DEPTH else ():
            if name in required or self._draw.random() < OPTIONAL_SHARE:
                written[name] = self._write(inner, (*path, name), name, depth + 1)
        return written

    def _resolve(self, schema: Any) -> Mapping[str, Any]:
        """A schema without references and alternatives."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return {}
            if isinstance(reference := schema.get("$ref"), str):
                schema = self._definitions.get(reference.rpartition("/")[2], {})
            elif options := schema.get("anyOf") or schema.get("oneOf"):
                schema = next((one for one in options if _kind(one) != "null"), options[0])
            else:
                break
        return schema if isinstance(schema, Mapping) else {}

    def _scalar(self, schema: Mapping[str, Any], kind: str, path: Path, key: str) -> Any:
        """A value from one of the sources that have one; sources that worked are taken more often."""
        sources = self._sources_for(schema, kind, key)
        name = ".".join(step for step in path if isinstance(step, str))
        weights = [1.0 if self._explores else self._weight(name, source) for source in sources]
        source = self._draw.choices(list(sources), weights)[0]
        self._sources[name] = source
        origin = source.partition(":")[0]
        if origin == "named":
            return self._draw.choice(sources[source]).value  # Of the schema: no split owns it.
        if origin == "fresh":
            low = int(schema.get("minimum", 1))
            bounds = low, max(low, int(schema.get("maximum", low + 9998)))
            value: Any = fresh_value(kind, key, self._split, self._draw, bounds, _format(schema))
        else:
            chosen = self._draw.choice(sources[source])
            value = derived_value(chosen.text, self._split, self._draw) if origin == "derived" else chosen.value
            if origin == "linked":
                self._links[path] = chosen
        self._literals.append(value)
        return value

    def _weight(self, parameter: str, source: Source) -> float:
        weight = self._statistics.weight(self._tool, parameter, source) ** 2
        return LINK_FACTOR * weight if source.startswith("linked") else weight

    def _sources_for(self, schema: Mapping[str, Any], kind: str, key: str) -> dict[Source, list[Value]]:
        """The sources that have a value for a parameter; values that were seen under one key are one source."""
        sources: dict[Source, list[Value]] = {"fresh": []}
        if named := _named_values(schema, kind):
            sources["named"] = named
        groups: dict[Source, list[Value]] = {}
        for value in known_values(self._known, key, kind, self._split):
            groups.setdefault(f"{'known' if value.step is None else 'linked'}:{value.key}", []).append(value)
        for source, values in islice(groups.items(), MAX_GROUPS):
            sources[source] = values
            if kind == "string" and source.startswith("known"):
                sources[source.replace("known", "derived", 1)] = values
        return self._without_other_kinds(sources)

    def _without_other_kinds(self, sources: dict[Source, list[Value]]) -> dict[Source, list[Value]]:
        """The sources, with new values only like those of the kind that the tool's name has, if any are.

        Otherwise `create_directory` would be given names like those of files.
        """
        words = name_words(self._tool)
        derived = {source for source in sources if source.startswith("derived")}
        like = {source for source in derived if words & name_words(source.partition(":")[2])}
        left_out = derived - like if like else set()
        return {source: values for source, values in sources.items() if source not in left_out}


def _named_values(schema: Mapping[str, Any], kind: str) -> list[Value]:
    """The default and the examples of a schema."""
    kinds = str if kind == "string" else int | float
    examples = schema.get("examples")
    named: list[Any] = [schema.get("default"), *(examples if isinstance(examples, list) else ())]
    return [Value(one, "") for one in named if isinstance(one, kinds) and not isinstance(one, bool) and is_usable(one)]


def _format(schema: Mapping[str, Any]) -> str:
    """The format of a text; the one that its description tells, where the schema does not."""
    described = "date" if "YYYY-MM-DD" in str(schema.get("description", "")) else ""
    return str(schema.get("format", described))


def _kind(schema: Any) -> str:
    kind = schema.get("type", "object" if "properties" in schema else "string") if isinstance(schema, Mapping) else ""
    return next((one for one in kind if one != "null"), "null") if isinstance(kind, list) else str(kind)
