"""A process ends when its work is over: a tool that still holds a thread of it keeps nobody."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable

PATIENCE_S = 1.0
"""For threads that are about to end by themselves."""


def leaving(command: Callable[[], object]) -> None:
    """Runs a command that ends in SystemExit, everything closed; the interpreter alone would wait for all threads."""
    try:
        command()
    except SystemExit as end:
        if _held():
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            os._exit(code)
        gc.freeze()  # What is left is not looked through for garbage, which takes seconds behind a model.
        raise


def _held() -> bool:
    """Whether a thread goes on that nobody waits for."""
    until = time.monotonic() + PATIENCE_S
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                return True
    return False
