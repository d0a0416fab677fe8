"""A dedicated thread for updates, and one for the torch engine: one thread keeps its memory allocator's caches warm.
And threads for single pieces of work, which never hold up the end of the process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import Self, TypeVar

import anyio
from anyio import from_thread
from anyio.lowlevel import checkpoint_if_cancelled, current_token

Result = TypeVar("Result")


class WorkerThread:
    """Runs functions one after the other on its thread. A cancelled caller still waits until its function has ended."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def run(self, function: Callable[[], Result], on_cancel: Callable[[], None] = lambda: None) -> Result:
        """Runs the function. `on_cancel` is called once the caller is cancelled, and may let the function end early."""
        await checkpoint_if_cancelled()
        done = anyio.Event()
        result = self._pool.submit(copy_context().run, function)
        notify = partial(from_thread.run_sync, done.set, token=current_token())
        self._pool.submit(notify)  # Runs after the function, since there is one thread.
        await _wait_until_done(done, on_cancel)
        return result.result()


async def _wait_until_done(done: anyio.Event, on_cancel: Callable[[], None]) -> None:
    """Waits for the event even if cancelled: a shield holds off cancel scopes only, while Ctrl-C cancels the task
    itself, and the thread would then notify an event loop that already waits for the thread to end."""
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not done.is_set():
            try:
                await done.wait()
            except BaseException as error:
                cancelled = error
                on_cancel()
    if cancelled is not None:
        raise cancelled


def run_in_background(name: str, work: Callable[[], Result]) -> Future[Result]:
    """Starts the thread; the future has the function's result or error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # boundary: whoever waits for the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return future
