"""A file becomes plain values or one clear mistake; nothing in a file can run code or grow without bound."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml

from gateway.config.entries import shown
from gateway.config.env import Loc
from gateway.config.lines import MOST_BYTES, line_of
from gateway.errors import ConfigError

ConfigError.line_of = staticmethod(line_of)

MOST_VALUES = 200_000
"""Values in one file, each alias counted as what it stands for."""
MOST_DEPTH = 100
YAML = "tag:yaml.org,2002:"


def read(file: Path) -> Any:
    """What a YAML or JSON file says; an empty one says nothing."""
    text = _text(file)
    return _json(text, file) if file.suffix == ".json" else _yaml(text, file)


def read_placed(file: Path) -> tuple[Any, Mapping[Loc, int]]:
    """What a YAML file says, and for each key of its mappings the line on which it stands."""
    with _told(file):
        loader = _Loader(_text(file))
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _Bounds(file).check(node)
        return loader.construct_document(node), dict(_lines(node))


def value(text: str, file: Path) -> Any:
    """What a text of the command line means: a number, a truth value, a list, nothing, or itself."""
    return _yaml(text, file)


def _lines(node: yaml.Node, loc: Loc = ()) -> Iterator[tuple[Loc, int]]:
    for key, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        yield (*loc, key.value), key.start_mark.line + 1
        yield from _lines(inner, (*loc, key.value))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError("there is no such file", file=shown(file), remedy="create it, or name another") from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(problem, file=shown(file), remedy="name a file that this user may read") from None
    if len(data) > MOST_BYTES:
        problem = f"is larger than {MOST_BYTES} bytes"
        raise ConfigError(problem, file=shown(file), remedy="split it, and keep data out of the configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is no UTF-8 text (byte {error.start})"
        raise ConfigError(problem, file=shown(file), remedy="save it as UTF-8") from None


def _json(text: str, file: Path) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise ConfigError(f"the key {key!r} is there twice", file=shown(file), remedy="keep one of them")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise ConfigError(f"{name} is no JSON", file=shown(file), remedy="write a number")

    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        remedy = "mend it there; JSON has no comments and no comma after the last item"
        raise ConfigError(f"is no JSON: {error.msg}", file=shown(file), field=place, remedy=remedy) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", file=shown(file), remedy="flatten it") from None


class _Loader(yaml.SafeLoader):
    """Plain JSON values; dates stay text, and `1e-5` is a number as verl reads it."""

    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in pairs if tag != f"{YAML}timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)

PLAIN = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")
)


def _yaml(text: str, file: Path) -> Any:
    with _told(file):
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Bounds(file).check(node)
        return loader.construct_document(node)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        # Without the snippet that YAML offers: it may quote a secret.
        mark = error.problem_mark or error.context_mark
        problem = f"is no YAML: {error.problem or error.context}"
        raise _at(
            mark, problem, file, "mend it there; a value with `:`, `#`, `{` or a tab in it wants quotes"
        ) from None
    except yaml.YAMLError:
        problem = "holds a character that YAML forbids"
        raise ConfigError(problem, file=shown(file), remedy="remove control characters") from None
    except RecursionError:
        raise ConfigError("is nested too deeply", file=shown(file), remedy="flatten it") from None
    except (ValueError, OverflowError):
        problem = "holds a number that cannot be read"
        raise ConfigError(problem, file=shown(file), remedy="put quotes around it to make it text") from None


class _Bounds:
    """Refuses what aliases, tags and repeated keys could smuggle past a reader of the file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.sizes: dict[int, int] = {}
        self.open: set[int] = set()

    def check(self, node: yaml.Node) -> int:
        """How many values the node stands for."""
        if id(node) in self.open:
            self._refuse(node, "holds itself", "write the value out")
        if id(node) not in self.sizes:
            self.open.add(id(node))
            self.sizes[id(node)] = self._size(node)
            self.open.discard(id(node))
        return self.sizes[id(node)]

    def _size(self, node: yaml.Node) -> int:
        if node.tag not in PLAIN:
            self._refuse(
                node, f"the tag {node.tag.removeprefix('tag:yaml.org,2002:')!r} is no plain value", "remove it"
            )
        if len(self.open) > MOST_DEPTH:
            self._refuse(node, "is nested too deeply", "flatten it")
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            self._keys(node)
            inner = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        size = 1 + sum(self.check(child) for child in inner)
        if size > MOST_VALUES:
            self._refuse(node, f"stands for more than {MOST_VALUES} values", "use fewer aliases")
        return size

    def _keys(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == f"{YAML}merge":
                continue
            if key.tag != f"{YAML}str":
                self._refuse(key, "a key is no text", "put it in quotes")
            if key.value in seen:
                self._refuse(key, f"the key {key.value!r} is there twice", "keep one of them")
            seen.add(key.value)

    def _refuse(self, node: yaml.Node, problem: str, remedy: str) -> NoReturn:
        raise _at(node.start_mark, problem, self.file, remedy)


def _at(mark: yaml.Mark | None, problem: str, file: Path, remedy: str) -> ConfigError:
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return ConfigError(problem, file=shown(file), field=place, remedy=remedy)
