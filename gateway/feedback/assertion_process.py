"""The part of an assertion that runs in the program's process: it prints digests of the values that are judged outside.

Only the standard library is there: the text of this module comes before a call of `run`, in one file.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import types
from typing import Any

REPORT = "__mtrl_report__"
"""What the assertion calls with the number of a value, and the value."""
END = "end"


def digest(value: object) -> str:
    """The same text for plain values that are equal, and for what derives from them."""
    return hashlib.sha256(_describe(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _describe(value: Any) -> str:
    if isinstance(value, complex) and value.imag == 0:
        value = value.real
    if hasattr(value, "as_integer_ratio") and not isinstance(value, type):
        try:
            return "{:x}/{:x}".format(*value.as_integer_ratio())
        except (OverflowError, ValueError):  # infinite, or no number
            return str(float(value))
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes | bytearray):
        return f"b{bytes(value)!r}"
    if isinstance(value, list | tuple):
        return f"{'list' if isinstance(value, list) else 'tuple'}[{','.join(map(_describe, value))}]"
    if isinstance(value, set | frozenset):
        return f"set[{','.join(sorted(map(_describe, value)))}]"
    if isinstance(value, dict):
        return f"dict[{','.join(sorted(f'{_describe(key)}:{_describe(item)}' for key, item in value.items()))}]"
    return f"{type(value).__module__}.{type(value).__qualname__}:{value!r}"


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


def run(program: str, assertion: str, mark: str) -> None:
    """Runs the program, then the assertion with its names. Lines of ours start with the mark."""
    output, reported = os.dup(1), set[str]()

    def report(number: int | str, value: object = None) -> None:
        line = f"{mark} {number} {digest(value)}"
        if line not in reported:
            reported.add(line)
            os.write(output, f"\n{line}\n".encode())

    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "program.py", "exec", dont_inherit=True), vars(module))  # noqa: S102 - confined
    names = {"raises": Raises} | vars(module) | {"__name__": "assertion", REPORT: report}
    exec(compile(assertion, "assertion", "exec", dont_inherit=True), names)  # noqa: S102 - confined
    report(END)
