"""Reads YAML, JSON and TOML files into plain values, with bounds on size, depth and aliases, and no YAML tags.

JSON may have comments and trailing commas, as in the files of editors.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from gateway.config.diagnostics import MAX_BYTES, locate_field
from gateway.config.entries import display_path
from gateway.config.environment import Loc
from gateway.config.json_comments import blank_json_comments
from gateway.errors import ConfigError

ConfigError.locate = staticmethod(locate_field)

MAX_VALUES = 200_000
"""Maximum number of values in one file, with aliases expanded."""
MAX_DEPTH = 100
YAML = "tag:yaml.org,2002:"


def read_file(file: Path) -> Any:
    """The value of a YAML, JSON or TOML file; None if it is empty."""
    parse = PARSERS.get(file.suffix, parse_value)
    try:
        return parse(read_text(file), file)
    except RecursionError:
        raise ConfigError("is nested too deeply", file=display_path(file), remedy="flatten it") from None


def read_with_lines(file: Path) -> tuple[Any, Mapping[Loc, int]]:
    """The value of a YAML file, and the line of each key."""
    value, node = _parse_yaml(read_text(file), file)
    return value, dict(_key_lines(node))


def parse_value(text: str, file: Path) -> Any:
    """Parses YAML, also a value from the command line: a number, boolean, list, null or string."""
    return _parse_yaml(text, file)[0]


def _key_lines(node: yaml.Node | None, loc: Loc = ()) -> Iterator[tuple[Loc, int]]:
    for key, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        yield (*loc, key.value), key.start_mark.line + 1
        yield from _key_lines(inner, (*loc, key.value))


def read_text(file: Path) -> str:
    """The text of a small UTF-8 file."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            "there is no such file", file=display_path(file), remedy="create it, or name another"
        ) from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(problem, file=display_path(file), remedy="name a file that this user may read") from None
    if len(data) > MAX_BYTES:
        problem = f"is larger than {MAX_BYTES} bytes"
        raise ConfigError(problem, file=display_path(file), remedy="split it, and keep data out of the configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
        raise ConfigError(problem, file=display_path(file), remedy="save it as UTF-8") from None


def _parse_json(text: str, file: Path) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in items:
            if key in mapping:
                raise ConfigError(f"duplicate key {key!r}", file=display_path(file), remedy="keep one of them")
            mapping[key] = value
        return mapping

    def constant(name: str) -> NoReturn:
        raise ConfigError(f"{name} is not JSON", file=display_path(file), remedy="write a number")

    if not text.strip():
        return None
    try:
        return json.loads(blank_json_comments(text), object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        location = f"line {error.lineno}, column {error.colno}"
        remedy = "fix it there; JSON has double quotes around keys and texts, and commas between items"
        raise ConfigError(
            f"is not valid JSON: {error.msg}", file=display_path(file), field=location, remedy=remedy
        ) from None


def _parse_toml(text: str, file: Path) -> Any:
    try:
        return tomllib.loads(text) or None
    except tomllib.TOMLDecodeError as error:
        problem = f"is not valid TOML: {error}"
        raise ConfigError(problem, file=display_path(file), remedy="fix it there") from None


class _PlainLoader(yaml.SafeLoader):
    """Loads plain JSON values; dates remain text, and `1e-5` is a number as in verl."""

    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in pairs if tag != f"{YAML}timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)

PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")
)


def _parse_yaml(text: str, file: Path) -> tuple[Any, yaml.Node | None]:
    """The value and its node; None for both if there is none."""
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _NodeChecker(file).check(node)
        return loader.construct_document(node), node
    except yaml.MarkedYAMLError as error:
        # Without YAML's snippet of the file, which may contain a secret.
        mark = error.problem_mark or error.context_mark
        problem = f"is not valid YAML: {error.problem or error.context}"
        raise _error_at(
            mark, problem, file, "fix it there; a value that contains `:`, `#`, `{` or a tab needs quotes"
        ) from None
    except yaml.YAMLError:
        problem = "contains a character that YAML forbids"
        raise ConfigError(problem, file=display_path(file), remedy="remove control characters") from None
    except RecursionError:
        raise ConfigError("is nested too deeply", file=display_path(file), remedy="flatten it") from None
    except (ValueError, OverflowError):
        problem = "contains a number that cannot be parsed"
        raise ConfigError(problem, file=display_path(file), remedy="put quotes around it to make it text") from None


PARSERS: Mapping[str, Callable[[str, Path], Any]] = {
    ".json": _parse_json,
    ".jsonc": _parse_json,
    ".toml": _parse_toml,
}
"""The parser of each kind of file; every other file is YAML."""


class _NodeChecker:
    """Refuses YAML that plain values don't need: recursive or excessive aliases, tags, and duplicate keys."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.sizes: dict[int, int] = {}
        self.open: set[int] = set()

    def check(self, node: yaml.Node) -> int:
        """The number of values in the node, with aliases expanded."""
        if id(node) in self.open:
            self._fail(node, "contains itself", "write the value out")
        if id(node) not in self.sizes:
            self.open.add(id(node))
            self.sizes[id(node)] = self._measure(node)
            self.open.discard(id(node))
        return self.sizes[id(node)]

    def _measure(self, node: yaml.Node) -> int:
        if node.tag not in PLAIN_TAGS:
            self._fail(node, f"the tag {node.tag.removeprefix('tag:yaml.org,2002:')!r} is not allowed", "remove it")
        if len(self.open) > MAX_DEPTH:
            self._fail(node, "is nested too deeply", "flatten it")
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            inner = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        size = 1 + sum(self.check(child) for child in inner)
        if size > MAX_VALUES:
            self._fail(node, f"contains more than {MAX_VALUES} values", "use fewer aliases")
        return size

    def _check_keys(self, node: yaml.MappingNode) -> None:
        names: set[str] = set()
        for key, _ in node.value:
            if key.tag == f"{YAML}merge":
                continue
            if key.tag != f"{YAML}str":
                self._fail(key, "a key is not a string", "put it in quotes")
            if key.value in names:
                self._fail(key, f"duplicate key {key.value!r}", "keep one of them")
            names.add(key.value)

    def _fail(self, node: yaml.Node, problem: str, remedy: str) -> NoReturn:
        raise _error_at(node.start_mark, problem, self.file, remedy)


def _error_at(mark: yaml.Mark | None, problem: str, file: Path, remedy: str) -> ConfigError:
    location = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return ConfigError(problem, file=display_path(file), field=location, remedy=remedy)
