"""Exits the process when a command has finished, even if a tool's thread is still running."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

JOIN_TIMEOUT_S = 1.0
"""Time for threads that are about to end by themselves."""


_PR_SET_DUMPABLE = 4


def hide_environment() -> None:
    """Closes this process's memory and environment, with their secrets, to other processes of its user.

    Only a sandbox closes them to processes of root.
    """
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


@contextmanager
def exit_despite_threads() -> Iterator[None]:
    """Around a command that ends with SystemExit; the interpreter alone would wait for all non-daemon threads."""
    try:
        yield
    except SystemExit as end:
        if _has_blocking_thread():
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            os._exit(code)
        gc.freeze()  # Skips garbage collection at exit, which takes seconds after a model was loaded.
        raise


def _has_blocking_thread() -> bool:
    """Whether a non-daemon thread is still running after a short wait."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return True
    return False
