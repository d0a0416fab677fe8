"""Awaits async user code: a coroutine that ignores its cancellation again and again is closed.

anyio waits until a cancelled task has ended, and cancels it again at each of its waits. Code that goes on all the same
would hold its caller, and whoever waits for that, for ever. This is for asyncio; with trio code is awaited as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Coroutine, Generator
from types import CoroutineType, coroutine
from typing import TYPE_CHECKING, Any

from gateway.user_code import UserCode, current_asyncio_task

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

MAX_CANCELLATIONS = 100
"""How often code may go on after a cancellation. Code that cleans up in a shielded scope is cancelled once."""


def await_user_code(value: Awaitable[Any]) -> Awaitable[Any]:
    """What gives the awaited result. What the code raises is raised as it is."""
    task = current_asyncio_task()
    return value if task is None or not isinstance(value, CoroutineType) else _drive(value, task)


@coroutine
def _drive(code: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> Generator[Any, Any, Any]:
    """Does what `await` does, until there were too many cancellations. Inner scopes take theirs back when they end."""
    limit = task.cancelling() + MAX_CANCELLATIONS
    error: BaseException | None = None
    while True:
        try:
            waited = code.send(None) if error is None else code.throw(error)
        except StopIteration as end:
            return end.value
        try:
            yield waited
            error = None
        except GeneratorExit:
            code.close()
            raise
        except BaseException as raised:
            if task.cancelling() >= limit:
                _close(code)
                raise
            error = raised


def _close(code: Coroutine[Any, Any, Any]) -> None:
    name = getattr(code, "__qualname__", type(code).__name__)
    log.error("%s went on after %d cancellations; it was closed", name, MAX_CANCELLATIONS)
    try:
        with UserCode():
            code.close()
    except Exception:  # boundary: user code; it may go on here, too
        log.exception("%s failed when it was closed", name)
