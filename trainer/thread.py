"""A thread of one's own: what computes is quicker where it did before, for memory that it gave back lies ready."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Self, TypeVar

import anyio
from anyio import from_thread
from anyio.lowlevel import checkpoint_if_cancelled, current_token

Result = TypeVar("Result")


class OwnThread:
    """Runs what it is given one after the other. Whoever waits and is cancelled waits until it is over."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def run(self, act: Callable[[], Result]) -> Result:
        await checkpoint_if_cancelled()
        over, token, context = anyio.Event(), current_token(), copy_context()

        def work() -> Result:
            try:
                return context.run(act)
            finally:
                from_thread.run_sync(over.set, token=token)

        result = self._pool.submit(work)
        await _without_leaving(over)
        return result.result()


async def _without_leaving(over: anyio.Event) -> None:
    """A shield keeps off scopes alone. Ctrl-C cancels the task itself, and the thread would tell a loop that waits for
    the thread to end."""
    left: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not over.is_set():
            try:
                await over.wait()
            except BaseException as error:
                left = error
    if left is not None:
        raise left
