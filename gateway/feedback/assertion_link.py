"""The link between the process of a program and that of an assertion about it: lines of JSON over two pipes.

Plain data is copied; other objects stay in their process, and the other side gets something that stands for them.
What the program's side sends is data of a hostile process: no function of ours is ever chosen by it.
Used where only the standard library is there.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import IO, Any

MAX_LINE_BYTES = 16 * 2**20
"""A longer message of the program ends the test."""
SHARED_TYPES = (int, str, float, bool, list, dict, set, tuple, bytes, complex, frozenset, bytearray, range, object)
"""Types that are the same in both processes. Functions never are: called with the program's data, some run code."""
MAX_EXACT = 2**53
COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
PLAIN = (str, int, float, bytes, tuple, list, dict, set, frozenset)
"""Types whose subclasses (named tuples, counters, enumerations) are compared as plain data."""
MODULE_VALUES: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("fractions", "Fraction"): lambda value: (value.numerator, value.denominator),
    ("decimal", "Decimal"): lambda value: (str(value),),
    ("datetime", "date"): lambda value: (value.year, value.month, value.day),
    ("datetime", "time"): lambda value: (value.hour, value.minute, value.second, value.microsecond),
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("datetime", "datetime"): lambda value: (*value.timetuple()[:6], value.microsecond),
}
"""Values of standard modules that are copied, with the arguments that make an equal one."""


SCALARS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if abs(value) < MAX_EXACT else {"int": hex(value)},
    float: lambda value: value if math.isfinite(value) else {"float": repr(value)},
    complex: lambda value: {"complex": repr(value)},
    bytes: lambda value: {"bytes": value.hex()},
    bytearray: lambda value: {"bytearray": value.hex()},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
}


class ProgramEnded(BaseException):
    """The program's process ended or broke the protocol; no assertion may catch it."""


class Link:
    """One end of the pipes: asks the other side to apply functions, and applies those that it may ask for."""

    def __init__(self, read: IO[bytes], write: IO[bytes], functions: dict[str, Callable[..., Any]]) -> None:
        self._read, self._write, self._functions = read, write, functions
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._others: dict[int, Any] = {}
        self._other_numbers: dict[int, int] = {}
        self.is_broken = False

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Has the other side apply a function; lists, sets and dictionaries that it changed are changed here, too."""
        words = {name: self.encode(value) for name, value in kwargs.items()}
        self._send({"do": function, "args": [self.encode(value) for value in args], "kwargs": words})
        while "do" in (answer := self._receive()):
            self._send(self._apply(answer))
        if "raised" in answer:
            raise self.decode_error(answer["raised"])
        for index, changed in answer["changed"]:
            restore(args[index], self.decode(changed))
        return self.decode(answer["value"])

    def serve(self) -> None:
        """Answers until the other side has gone."""
        while True:
            self._send(self._apply(self._receive()))

    def _apply(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            args = [self.decode(value) for value in request["args"]]
            before = [json.dumps(self.encode(value)) for value in args]
            kwargs = {name: self.decode(value) for name, value in request["kwargs"].items()}
            value = self.encode(self._functions[request["do"]](*args, **kwargs))
            after = [self.encode(value) for value in args]
            changed = [(index, new) for index, new in enumerate(after) if json.dumps(new) != before[index]]
        except ProgramEnded:
            raise
        except BaseException as error:  # boundary: code of the program, or of the assertion
            return {"raised": self._encode_error(error)}
        return {"value": value, "changed": changed}

    def _send(self, message: Any) -> None:
        try:
            self._write.write(json.dumps(message).encode() + b"\n")
            self._write.flush()
        except OSError as error:
            self._break(error)

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._read.readline(MAX_LINE_BYTES)
            message: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else self._break(EOFError())
        except (ValueError, OSError, RecursionError) as error:
            self._break(error)
        return message

    def _break(self, error: BaseException) -> Any:
        self.is_broken = True
        raise ProgramEnded from error

    def encode(self, value: Any) -> Any:
        """A value as JSON: plain data, a value of a standard module, or the number of an object that stays here."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is list:
            return [self.encode(item) for item in value]
        if kind is dict:
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if kind in COLLECTIONS.values():
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind in SCALARS:
            return SCALARS[kind](value)
        make = MODULE_VALUES.get((kind.__module__, kind.__name__))
        if make is not None and getattr(value, "tzinfo", None) is None:
            return {"made": [kind.__module__, kind.__name__, list(make(value))]}
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        if (number := self.number_of_other(value)) is not None:
            return {"yours": number}
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        name = str(getattr(value, "__name__", ""))
        if vars(builtins).get(name) is value and (is_error or value in SHARED_TYPES):
            return {"builtin": name}
        if is_error and value.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
            return {"standard": [value.__module__, value.__name__]}
        encoded: dict[str, Any] = {"object": self.keep(value)}
        if is_error:
            bases = [self.encode(base) for base in value.__bases__ if issubclass(base, BaseException)]
            encoded |= {"error": value.__name__, "bases": bases}
        if isinstance(value, types.CoroutineType):
            encoded["coroutine"] = True
        if isinstance(value, PLAIN):
            encoded["plain"] = True
        return encoded

    def number_of_other(self, value: Any) -> int | None:
        """The number of the object of the other side that a value stands for, if it does."""
        return self._other_numbers.get(id(value))

    def kept(self, number: int) -> Any:
        """The object with a number."""
        return self._kept[number]

    def keep(self, value: Any) -> int:
        """The number of an object that stays here."""
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        return number

    def _encode_error(self, error: BaseException) -> dict[str, Any]:
        try:
            return {"class": self.encode(type(error)), "args": self.encode(error.args)}
        except BaseException:  # boundary: arguments that cannot be copied
            return {"class": {"builtin": "Exception"}, "args": {"tuple": [type(error).__name__]}}

    def decode(self, value: Any) -> Any:
        """The value of JSON from the other side; nothing of it is ever run."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        name, content = next(iter(value.items()))
        if name in DECODERS:
            return DECODERS[name](content)
        if name == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if name == "yours":
            return self.kept(content)
        if name != "object":
            return self.decode_other(name, content)
        if content not in self._others:
            self._others[content] = other = self._make_other(value)
            self._other_numbers[id(other)] = content
        return self._others[content]

    def decode_other(self, name: str, content: Any) -> Any:
        """A collection; sides that may be sent more override it."""
        return COLLECTIONS[name](self.decode(item) for item in content)

    def _make_other(self, encoded: dict[str, Any]) -> Any:
        """Something that stands for an object of the other side."""
        if "error" not in encoded:
            return self.stand_in(encoded)
        bases = tuple(self.decode(base) for base in encoded["bases"])
        if not all(isinstance(base, type) and issubclass(base, BaseException) for base in bases):
            raise TypeError("a class of exceptions has a base that is none")
        return type(str(encoded["error"]), bases, {"__module__": "program"})

    def stand_in(self, encoded: dict[str, Any]) -> Any:
        """For a function of the assertion: calls it there."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.ask("call", call, *args, **kwargs)

        return call

    def decode_error(self, raised: dict[str, Any]) -> BaseException:
        """The exception that the other side raised."""
        kind = self.decode(raised["class"])
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            return TypeError("what was raised is no exception")
        args = self.decode(raised["args"])
        try:
            return kind(*args)
        except TypeError:
            error = kind.__new__(kind)
            error.args = args
            return error


def restore(old: Any, new: Any) -> None:
    """Gives a list, set, dictionary or the like the content that a call left it with, and what is in it too."""
    if type(old) is list and type(new) is list:
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            if type(before) is type(after) and type(before) in (list, dict, set):
                restore(before, after)
                new[index] = before
        old[:] = new
    elif type(old) in (dict, set) and type(new) is type(old):
        old.clear()
        old.update(new)
    elif type(old) in (bytearray, deque) and type(new) is type(old):
        old.clear()
        old.extend(new)


def builtin_type(name: str) -> Any:
    """A type that both processes have: plain data, or an exception."""
    value = vars(builtins)[name]
    if value in SHARED_TYPES or (isinstance(value, type) and issubclass(value, BaseException)):
        return value
    raise TypeError(f"{name!r} is no type of plain data")


def standard_error(module: str, name: str) -> type[BaseException]:
    """An exception class of the standard library."""
    if module.partition(".")[0] not in sys.stdlib_module_names or "__" in module:
        raise ImportError(f"{module!r} is no module of the standard library")
    kind = getattr(importlib.import_module(module), name)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind
    raise TypeError(f"{module}.{name} is no exception")


def made_value(content: list[Any]) -> Any:
    """A value of a standard module that has been copied."""
    module, name, args = content
    if (module, name) not in MODULE_VALUES:
        raise TypeError(f"{module}.{name} is not copied")
    return getattr(importlib.import_module(module), name)(*args)


DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": float,
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda content: range(*content),
    "builtin": builtin_type,
    "standard": lambda content: standard_error(*content),
    "made": made_value,
}
