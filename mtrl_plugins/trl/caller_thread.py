"""Runs a user's synchronous functions on the thread that called `train()`, one after the other, as TRL does.

In a script and in a notebook that is the main thread, so that a function may use `signal.alarm`, or a database
connection that was opened there. Training itself runs in another thread with an event loop of its own, which is why it
can be called where a loop is running, as in Jupyter.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import anyio
from anyio.from_thread import run_sync as run_in_loop
from anyio.lowlevel import current_token

from gateway.errors import UserCodeError
from gateway.user_code import UserCode, is_interrupt

Result = TypeVar("Result")
INTERRUPT_S = 1.0
"""How long after an interrupt of our own a KeyboardInterrupt counts as that one, and not as Ctrl-C."""

START_S = 1.0
"""Time for a new thread to begin."""


class DeadlinePassed(TimeoutError):
    """A function took too long."""


class CallerThread:
    """Serves calls of other threads on the thread that runs `run`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._ident: int | None = None
        self._running: _Call | None = None
        self._interrupted_at = float("-inf")
        self._started = threading.Event()
        self._is_stopped = False
        self._stop: Callable[[], None] | None = None

    def run(self, main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Runs `main` in an event loop in another thread, and serves calls until it ends. Ctrl-C cancels it."""
        ended: Future[Result] = Future()
        thread = threading.Thread(target=self._run_loop, args=(main, ended), name="training", daemon=True)
        self._ident = threading.get_ident()
        try:
            thread.start()
            self._serve_until_end()
        except KeyboardInterrupt:
            self._is_stopped = True
            if self._started.wait(START_S):  # Ctrl-C may come in `start`, before or after the thread began.
                if self._stop is not None:
                    self._stop()
                self._serve_until_end()
            raise
        finally:
            self._close()
        return ended.result()

    def call(self, function: Callable[..., Any], timeout_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function on the serving thread and waits. The time in the queue does not count.

        Raises DeadlinePassed if it takes longer, and interrupts it where that is possible: in the main thread.
        """
        if self._ident == threading.get_ident():
            return function(*args, **kwargs)
        call = _Call(partial(_call_user_code, function, *args, **kwargs))
        with self._lock:
            if self._ident is None:
                raise RuntimeError("training has ended")
            self._queue.put(call)
        call.started.wait()
        try:
            return call.result.result(timeout_s)
        except FutureTimeout:
            if call.result.done():
                raise
            self._interrupt(call)
            raise DeadlinePassed(f"no answer within {timeout_s:g} s") from None

    def _run_loop(self, main: Callable[[], Coroutine[Any, Any, Result]], ended: Future[Result]) -> None:
        self._started.set()

        async def cancellable() -> Result:
            with anyio.CancelScope() as scope:
                token = current_token()
                self._stop = lambda: run_in_loop(scope.cancel, token=token)
                if self._is_stopped:
                    scope.cancel()
                return await main()
            raise RuntimeError("training was stopped")

        try:
            ended.set_result(anyio.run(cancellable))
        except BaseException as error:
            ended.set_exception(error)
        finally:
            self._stop = None
            self._queue.put(None)

    def _close(self) -> None:
        """Refuses the calls that still wait, whose threads would never end."""
        with self._lock:
            self._ident = None
        while not self._queue.empty():
            if (call := self._queue.get()) is not None:
                call.result.set_exception(RuntimeError("training has ended"))
                call.started.set()

    def _serve_until_end(self) -> None:
        while True:
            try:
                call = self._queue.get()
                if call is None:
                    return
                self._serve(call)
            except KeyboardInterrupt:
                if not self._is_own_interrupt():
                    raise

    def _serve(self, call: _Call) -> None:
        with self._lock:
            self._running = call
        call.started.set()
        try:
            call.result.set_result(call.work())
        except KeyboardInterrupt as error:
            if not is_interrupt(error):
                call.result.set_exception(UserCodeError(error))
                return
            if not call.result.done():
                call.result.set_exception(TimeoutError("interrupted").with_traceback(error.__traceback__))
            raise
        except Exception as error:
            call.result.set_exception(error)
        except BaseException as error:  # boundary: user code; raised in an event loop, it would end that
            call.result.set_exception(UserCodeError(error))
        finally:
            with self._lock:
                self._running = None

    def _interrupt(self, call: _Call) -> None:
        """Raises KeyboardInterrupt in a function that is too late, if it is in the main thread."""
        handler, main = signal.getsignal(signal.SIGINT), threading.main_thread().ident
        with self._lock:
            if self._running is call and self._ident == main and handler is signal.default_int_handler:
                self._interrupted_at = time.monotonic()
                signal.pthread_kill(main, signal.SIGINT)  # type: ignore[arg-type]

    def _is_own_interrupt(self) -> bool:
        return time.monotonic() - self._interrupted_at < INTERRUPT_S


def _call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with UserCode():
        return function(*args, **kwargs)


class _Call:
    """A call that waits for the serving thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.started = threading.Event()
        self.result: Future[Any] = Future()
