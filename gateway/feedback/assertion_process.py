"""The process of an assertion about a program: evaluates it here, and asks the program's process for values.

Plain data of the program is copied and compared here, so that the program neither sees nor decides what it is measured
by. Its other objects have stand-ins, which forward attributes, calls and operators, but no comparison with plain data.
Used where only the standard library is there.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from gateway.feedback.assertion_link import Link

COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
SECRET_TELLING = ("sub", "xor")
"""Operators that measure a difference: with plain data on the other side, an object could forge none."""
OPERATORS = ("add", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or")
UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "abs": operator.abs,
}
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "len": len, "int": int, "float": float, "complex": complex, "index": operator.index, "round": round,
    "reversed": reversed,
}  # fmt: skip
BUILTIN_NAMES = frozenset(vars(builtins))


class StandIn:
    """Stands for an object of the program. An object of a type that derives from plain data is compared as such."""

    __slots__ = ("_mtrl_is_plain", "_mtrl_link")

    def __init__(self, link: Link, is_plain: bool) -> None:
        object.__setattr__(self, "_mtrl_link", link)
        object.__setattr__(self, "_mtrl_is_plain", is_plain)

    def __getattr__(self, name: str) -> Any:
        return self._mtrl_link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._mtrl_link.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._mtrl_link.ask("call", self, *args, **kwargs)

    def __iter__(self) -> Any:
        return iter(to_plain(self)) if self._mtrl_is_plain else self._mtrl_link.ask("iter", self)

    def __next__(self) -> Any:
        return self._mtrl_link.ask("next", self)

    def __contains__(self, item: Any) -> bool:
        return any(own is item or own == item for own in self)

    def __getitem__(self, key: Any) -> Any:
        return self._mtrl_link.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mtrl_link.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._mtrl_link.ask("delitem", self, key)

    def __bool__(self) -> bool:
        return bool(to_plain(self)) if self._mtrl_is_plain else _need(bool, self._mtrl_link.ask("bool", self))

    def __hash__(self) -> int:
        return hash(to_plain(self)) if self._mtrl_is_plain else int(_need(int, self._mtrl_link.ask("hash", self)))

    def __str__(self) -> str:
        return str(_need(str, self._mtrl_link.ask("str", self)))

    def __repr__(self) -> str:
        return str(_need(str, self._mtrl_link.ask("repr", self)))

    def __format__(self, spec: str) -> str:
        return str(_need(str, self._mtrl_link.ask("format", self, spec)))

    def __enter__(self) -> Any:
        return self._mtrl_link.ask("enter", self)

    def __exit__(self, *_: object) -> None:
        self._mtrl_link.ask("exit", self)

    def __instancecheck__(self, instance: Any) -> bool:
        return bool(_need(bool, self._mtrl_link.ask("isinstance", instance, self)))

    def __subclasscheck__(self, subclass: Any) -> bool:
        return bool(_need(bool, self._mtrl_link.ask("issubclass", subclass, self)))


def to_plain(value: Any) -> Any:
    """The plain data in an object of the program, where its type derives from such; other values as they are."""
    if type(value) is not StandIn or not value._mtrl_is_plain:
        return value
    plain = value._mtrl_link.ask("plain", value)
    if type(plain) is StandIn:
        raise TypeError("an object of the program is not the plain data that it should be")
    return plain


def _need(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"an object of the program gave {type(value).__name__} instead of {kind.__name__}")
    return value


def _compare(name: str) -> Callable[[StandIn, Any], Any]:
    function = getattr(operator, name)

    def compare(self: StandIn, other: Any) -> Any:
        left, right = to_plain(self), to_plain(other)
        if type(left) is StandIn and type(right) is StandIn:
            return _need(bool, self._mtrl_link.ask(name, self, other))
        if type(left) is StandIn or type(right) is StandIn:
            return {"eq": False, "ne": True}.get(name, NotImplemented)
        return function(left, right)

    return compare


def _operate(name: str, *, is_swapped: bool = False) -> Callable[[StandIn, Any], Any]:
    function = getattr(operator, {"and": "and_", "or": "or_"}.get(name, name))

    def operate(self: StandIn, other: Any) -> Any:
        left, right = (other, self) if is_swapped else (self, other)
        plain_left, plain_right = to_plain(left), to_plain(right)
        if type(plain_left) is not StandIn and type(plain_right) is not StandIn:
            return function(plain_left, plain_right)
        if type(left) is StandIn and type(right) is StandIn:
            return self._mtrl_link.ask(function.__name__, left, right)
        if name in SECRET_TELLING:
            return NotImplemented
        result = self._mtrl_link.ask(function.__name__, left, right)
        if type(result) is not StandIn:
            raise TypeError(f"an object of the program and plain data gave plain data by the operator {name!r}")
        return result

    return operate


def _convert(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: StandIn, *args: Any) -> Any:
        plain = to_plain(self)
        return self._mtrl_link.ask(name, self, *args) if type(plain) is StandIn else function(plain, *args)

    return convert


for _name in COMPARISONS:
    setattr(StandIn, f"__{_name}__", _compare(_name))
for _name in (*OPERATORS, *SECRET_TELLING):
    setattr(StandIn, f"__{_name}__", _operate(_name))
    setattr(StandIn, f"__r{_name}__", _operate(_name, is_swapped=True))
for _name, _function in (UNARY | CONVERSIONS).items():
    setattr(StandIn, f"__{_name}__", _convert(_name, _function))


class AssertionLink(Link):
    """The assertion's end: it gives the program data and functions to call, never objects with attributes."""

    def stand_in(self, encoded: dict[str, Any]) -> Any:
        other = StandIn(self, encoded.get("plain") is True)
        return self._await(encoded["object"]) if encoded.get("coroutine") is True else other

    async def _await(self, number: int) -> Any:
        return self.ask("run", number)

    def _encode_object(self, value: Any) -> Any:
        if self.number_of_other(value) is None:
            name = getattr(value, "__name__", "")
            if isinstance(value, types.BuiltinFunctionType | type) and vars(builtins).get(name) is value:
                return {"function": name}
            if isinstance(value, types.ModuleType):
                return {"module": name}
            if isinstance(value, Iterator):
                return {"iterator": {"object": self.keep(value.__next__)}}
            if not callable(value):
                kind = type(value).__name__
                raise TypeError(f"the program cannot be given a {kind}: assertions pass plain data and functions")
            if not isinstance(value, type):
                return {"object": self.keep(value)}
        return super()._encode_object(value)


class Raises:
    """A block that must raise an exception: `with raises(ValueError, match="negative") as caught`, as in pytest."""

    def __init__(self, expected: Any, match: str | None = None) -> None:
        self._expected, self._match = expected, match
        self.value: BaseException | None = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"{self._expected} was not raised")
        if not isinstance(error, self._expected):
            return False
        self.value = error
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{self._match!r} does not match {str(error)!r}")
        return True


class Names(dict[str, Any]):
    """The names of an assertion: its own, then those of the program.

    Builtins and modules are the real ones, which the program cannot replace, unless only such a name can be what the
    assertion is about: `assert sum(10, 15) == 6` where the program defines `sum`.
    """

    def __init__(self, tree: ast.Module, link: Link) -> None:
        super().__init__(__name__="assertion", __builtins__=builtins)
        self._link = link
        self._offered = frozenset(link.ask("names"))
        nodes = list(ast.walk(tree))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        own |= {name for node in nodes for name in _bound_names(node)}
        self.update(_find_modules(nodes, names - own))
        self._has_real_builtins = bool(names - own - self.keys() - BUILTIN_NAMES)

    def __missing__(self, name: str) -> Any:
        if name == "raises" and name not in self._offered:
            return Raises
        if name not in self._offered or (self._has_real_builtins and name in BUILTIN_NAMES):
            raise KeyError(name)
        return self._link.ask("name", name)


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
        yield node.name or ""
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.arg):
        yield node.arg


def _find_modules(nodes: list[ast.AST], names: set[str]) -> Iterator[tuple[str, Any]]:
    """Modules that an assertion uses without importing them: their names, always followed by names in them."""
    for name in sorted(names & (sys.stdlib_module_names - {"antigravity", "this"})):
        used = [node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_name(node.value, name)]
        count = sum(_is_name(node, name) for node in nodes)
        if len(used) == count and all(hasattr(importlib.import_module(name), attribute) for attribute in used):
            yield name, importlib.import_module(name)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def main() -> None:
    """Reads the assertion from standard input, evaluates it, and writes the verdict as JSON to standard output."""
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    text = sys.stdin.read()
    link = AssertionLink(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"), {"call": _call})
    problem = None
    try:
        tree = ast.parse(text)
        exec(compile(tree, "assertion", "exec"), Names(tree, link))  # noqa: S102 - a test of whoever trains
    except BaseException as error:  # boundary: anything but the end of the last line is a failure
        problem = _describe(error)
    verdicts.write(json.dumps({"is_broken": link.is_broken, "problem": problem}))
    verdicts.flush()
    os._exit(0)


def _call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not callable(function) or type(function) is StandIn:
        raise TypeError("the assertion passed no such function")
    return function(*args, **kwargs)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # boundary: the text of a program's exception
        return type(error).__name__
