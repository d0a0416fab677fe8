"""Exits the process when a command has finished, even if a tool's thread is still running."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

JOIN_TIMEOUT_S = 1.0
"""Time for threads that are about to end by themselves."""


_PR_SET_DUMPABLE = 4
OWN_PACKAGES = ("gateway.", "mtrl_plugins.", "trainer.")


def hide_environment() -> None:
    """Closes this process's memory and environment, with their secrets, to other processes of its user.

    Only a sandbox closes them to processes of root.
    """
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def tell_exits() -> None:
    """Has `os._exit` print where it is called, but for our own calls and those in forks of this process."""
    exit_at_once, process = os._exit, os.getpid()

    def tell(status: int) -> NoReturn:
        caller = sys._getframe(1)
        if os.getpid() == process and not str(caller.f_globals.get("__name__")).startswith(OWN_PACKAGES):
            with suppress(Exception):  # A closed stream stops nobody from leaving.
                sys.stderr.write(f"the process ends at once, by `os._exit({status})`:\n")
                traceback.print_stack(caller)
                sys.stderr.flush()
        exit_at_once(status)

    os._exit = tell


@contextmanager
def exit_despite_threads() -> Iterator[None]:
    """Around a command that ends with SystemExit; the interpreter alone would wait for all non-daemon threads.

    If a library crashes the interpreter meanwhile, or user code ends it, a stack says where.
    """
    faulthandler.enable(2)  # By the descriptor: the stream may be another one by then.
    tell_exits()
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
