"""The journal of user code that runs in a served gateway, which names at the next start what ended the process.

It lies in the user's folder for state (`XDG_STATE_HOME`), by the address that the gateway serves.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gateway.user_code import Journal, read_journal

log = logging.getLogger(__name__)

ENDED_IN = (
    "the gateway before this one ended without a word while user code was running: %s; "
    "if nobody killed it, look there for `os._exit` or for a library that crashes the interpreter"
)


def journal_file(host: str, port: int) -> Path:
    """The journal of the gateway at an address."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "mtrl" / f"gateway-{host}-{port}.running"


@contextmanager
def keep_journal(host: str, port: int) -> Iterator[None]:
    """Warns of what the gateway before this one ended in, and keeps a journal during the block, where it can write."""
    file = journal_file(host, port)
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError):  # No home, no permission, a full disk, or a gateway that uses it.
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(file.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if names := read_journal(file):
                log.warning(ENDED_IN, ", ".join(names))
            stack.enter_context(Journal(file))
        yield
