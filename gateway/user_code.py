"""Calls code that users or third parties wrote: whatever it raises becomes an `Exception`, which costs one call only.

Python lets `BaseException` pass every `except Exception`, and event loops end with a KeyboardInterrupt or SystemExit.
Here only what is really ours passes: Ctrl-C, the cancellation of our own task, and the closing of our own coroutine.
"""

from __future__ import annotations

import asyncio
import dis
import mmap
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from gateway.errors import UserCodeError

RAISE = dis.opmap["RAISE_VARARGS"]
OWN_PACKAGES = ("gateway.", "trainer.", "functools.", "builtins.")
"""Functions of these are not noted in a journal."""
SLOTS, SLOT_BYTES = 512, 256
"""How many calls a journal has room for, and bytes of each one's name."""


class Journal:
    """A file with the names of the calls of user code that are running now.

    It is a mapped file, which the kernel keeps when the process ends without a word, as by `os._exit`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("wb+") as opened:
            opened.write(bytes(SLOTS * SLOT_BYTES))  # A hole in a mapped file would end the process on a full disk.
            opened.flush()
            self._map = mmap.mmap(opened.fileno(), SLOTS * SLOT_BYTES)
        self._free = list(range(SLOTS))

    def __enter__(self) -> Self:
        _journals.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the file: this process has reached its end."""
        _journals.remove(self)
        self.file.unlink(missing_ok=True)

    def begin(self, name: str) -> int | None:
        """Notes that a call runs; returns its slot, or None if all are taken."""
        try:
            slot = self._free.pop()  # the one that was used last, whose memory is in the processor's cache
        except IndexError:
            return None
        self._map[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = _slot_text(name)
        return slot

    def end(self, slot: int) -> None:
        """Notes that a call has ended."""
        self._map[slot * SLOT_BYTES] = 0
        self._free.append(slot)


@lru_cache
def _slot_text(name: str) -> bytes:
    return name.encode("utf-8", "replace")[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")


_journals: list[Journal] = []


def read_journal(file: Path) -> list[str]:
    """What was running when the process that wrote a journal ended without a word."""
    try:
        data = file.read_bytes()[: SLOTS * SLOT_BYTES]
    except OSError:
        return []
    slots = (data[start : start + SLOT_BYTES] for start in range(0, len(data), SLOT_BYTES))
    names = (slot.split(b"\0")[0].decode("utf-8", "replace") for slot in slots)
    return sorted({name for name in names if name})


class UserCode:
    """A block that calls user code. What it raises leaves the block as an `Exception`, unless it is our own."""

    __slots__ = ("_function", "_notes")

    def __init__(self, function: object) -> None:
        """`function` is what is called, whose name a journal notes, or that name; None if there are blocks inside."""
        self._function = function
        self._notes: list[tuple[Journal, int]] = []

    def __enter__(self) -> Self:
        if _journals and self._function is not None:
            name = self._function if isinstance(self._function, str) else user_code_name(self._function)
            if name.startswith(OWN_PACKAGES):
                return self
            self._notes = [(journal, slot) for journal in _journals if (slot := journal.begin(name)) is not None]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for journal, slot in self._notes:
            journal.end(slot)
        if error is not None and not isinstance(error, Exception) and not is_own_exception(error):
            raise UserCodeError(error) from error


def user_code_name(function: Any) -> str:
    """`module.function`, or the name of an object's type."""
    with suppress(Exception):  # boundary: an object's attributes may be user code
        named = function if hasattr(function, "__qualname__") else type(function)
        return f"{named.__module__}.{named.__qualname__}"
    return type(function).__name__


def run_contained(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls user code in a worker thread, where no Ctrl-C and no cancellation arrives: nothing it raises is ours."""
    with UserCode(function):
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:  # boundary: user code
            raise UserCodeError(error) from error


def is_own_exception(error: BaseException) -> bool:
    """Whether an exception that passes through user code is not that code's own."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_own_exception(inner) for inner in error.exceptions)
    if isinstance(error, KeyboardInterrupt):
        return is_interrupt(error)
    if isinstance(error, GeneratorExit):
        return not _is_raised_by_statement(error)
    return _is_own_cancellation(error)


def is_interrupt(error: KeyboardInterrupt) -> bool:
    """Whether Ctrl-C caused it: the signal's handler or the event loop raised it, not a `raise` elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        return False
    trace = _innermost(error)
    frame = None if trace is None else trace.tb_frame
    if frame is not None and str(frame.f_globals.get("__name__")).startswith("asyncio."):
        return True
    return (frame is not None and frame.f_code is _handler_code()) or not _is_raised_by_statement(error)


def _handler_code() -> object:
    """The code of Python's handler of Ctrl-C; asyncio's is a partial of a method."""
    handler: Any = signal.getsignal(signal.SIGINT)
    handler = getattr(handler, "func", handler)
    return getattr(handler, "__code__", handler)


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_raised_by_statement(error: BaseException) -> bool:
    """Whether a `raise` statement began it, or nothing; signals and closed coroutines raise at other instructions."""
    trace = _innermost(error)
    return trace is None or trace.tb_frame.f_code.co_code[trace.tb_lasti] == RAISE


def _is_own_cancellation(error: BaseException) -> bool:
    """Whether the running task was cancelled; user code may raise asyncio's exception by itself, but not trio's."""
    try:
        if not isinstance(error, anyio.get_cancelled_exc_class()):
            return False
    except Exception:  # There is no event loop in this thread.
        return False
    if not isinstance(error, asyncio.CancelledError):
        return True
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def current_asyncio_task() -> asyncio.Task[Any] | None:
    """The running task of asyncio; None on trio."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
