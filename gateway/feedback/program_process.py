"""The process of a program that an assertion is about: runs it, then applies functions to its objects as asked.

Used where only the standard library is there.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from gateway.feedback.assertion_link import PLAIN, Link, ProgramEnded


class ProgramLink(Link):
    """The program's end: it may be given functions of builtins and of standard modules by their names."""

    def decode_other(self, name: str, content: Any) -> Any:
        if name == "function":
            return vars(builtins)[content]
        if name == "module":
            return importlib.import_module(content)
        if name == "iterator":
            return _iterate(self.decode(content))
        return super().decode_other(name, content)


def _iterate(take_next: Callable[[], Any]) -> Iterator[Any]:
    while True:
        try:
            item = take_next()
        except StopIteration:
            return
        yield item


def _call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _copy_plain(value: Any) -> Any:
    """The plain data in an object whose class derives from such."""
    base: Any = next(base for base in type(value).__mro__ if base in PLAIN)
    return base.__new__(base, value) if base in (str, int, float, bytes, tuple, frozenset) else base(value)


def _run_coroutine(coroutine: Any) -> Any:
    import asyncio  # here, since few programs need it

    return asyncio.run(coroutine)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "call": _call, "plain": _copy_plain, "getattr": getattr, "setattr": setattr, "iter": iter,
    "next": next, "isinstance": isinstance, "issubclass": issubclass, "bool": bool, "len": len, "hash": hash,
    "str": str, "repr": repr, "format": format, "int": int, "float": float, "complex": complex, "round": round,
    "reversed": reversed,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
}  # fmt: skip
"""What the assertion may have done with objects of the program, besides the functions of `operator`."""


def main() -> None:
    """Runs the program, then answers what the assertion asks until it is done."""
    path, read, write = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(path, encoding="utf-8", errors="replace") as file:
        source = file.read()
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv[:] = module, [path]
    exec(compile(source, path, "exec"), vars(module))  # noqa: S102 - the program, confined
    names = {
        "names": lambda: [name for name in vars(module) if type(name) is str],
        "name": vars(module).__getitem__,
        "run": lambda number: _run_coroutine(link.kept(number)),
    }
    link: ProgramLink = ProgramLink(os.fdopen(read, "rb"), os.fdopen(write, "wb"), vars(operator) | FUNCTIONS | names)
    try:
        link.serve()
    except ProgramEnded:
        os._exit(0)
