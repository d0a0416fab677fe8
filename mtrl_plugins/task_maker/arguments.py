"""Writes arguments for a tool's JSON Schema: from values seen before, new ones, and those that the schema names.

Which sources work for a parameter is learned while the server is surveyed, and does not change afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

from mtrl_plugins.task_maker.values import (
    Path,
    Value,
    derived_value,
    fresh_value,
    is_usable,
    key_fit,
    known_values,
    name_words,
)

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
