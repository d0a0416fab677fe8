"""Calls code that users or third parties wrote: whatever it raises becomes an `Exception`, which costs one call only.

Python lets `BaseException` pass every `except Exception`, and event loops end with a KeyboardInterrupt or SystemExit.
Here only what is really ours passes: Ctrl-C, the cancellation of our own task, and the closing of our own coroutine.
"""

from __future__ import annotations

import asyncio
import dis
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import anyio

from gateway.errors import UserCodeError

RAISE = dis.opmap["RAISE_VARARGS"]


class UserCode:
    """A block that calls user code. What it raises leaves the block as an `Exception`, unless it is our own."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception) and not is_own_exception(error):
            raise UserCodeError(error) from error


def run_contained(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls user code in a worker thread, where no Ctrl-C and no cancellation arrives: nothing it raises is ours."""
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
