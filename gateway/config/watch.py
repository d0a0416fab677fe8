"""A change is noticed by looking once a second, or at once on SIGHUP, and is told when it has settled."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.to_thread

Seen = dict[Path, tuple[int, int, int]]
"""Each file's time of change, size and inode."""

LOOKS = 10
"""A folder that does not settle is told as changed after so many looks."""


def changes(paths: Collection[Path], *, every_s: float = 1.0) -> AsyncGenerator[None]:
    """One event per settled change of the files, or of the YAML in the folders, and one per SIGHUP.

    Changes count from this call on. `paths` is read anew at each look, so that its owner may extend it.
    Hold it with `contextlib.aclosing`: its end gives SIGHUP back.
    """
    return _changes(paths, look(paths), every_s)


async def _changes(paths: Collection[Path], seen: Seen, every_s: float) -> AsyncGenerator[None]:
    with ExitStack() as stack:
        signals = stack.enter_context(anyio.open_signal_receiver(signal.SIGHUP)) if _signalled() else None
        while True:
            asked = await _asked(signals, every_s)
            now = await anyio.to_thread.run_sync(look, paths, abandon_on_cancel=True)
            if now != seen:
                now = await _settled(paths, now, every_s)
            if asked or now != seen:
                seen = now
                yield


def _signalled() -> bool:
    """Whether this thread of this system can be sent a SIGHUP."""
    return hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()


async def _asked(signals: AsyncIterator[signal.Signals] | None, every_s: float) -> bool:
    """Waits for the next look; true when a signal cuts the wait short."""
    with anyio.move_on_after(every_s):
        if signals is None:
            await anyio.sleep_forever()
        else:
            await anext(signals)
            return True
    return False


async def _settled(paths: Collection[Path], now: Seen, every_s: float) -> Seen:
    """What stands there once two looks agree: an editor writes in more than one step."""
    for _ in range(LOOKS):
        await anyio.sleep(every_s / 4)
        before, now = now, await anyio.to_thread.run_sync(look, paths, abandon_on_cancel=True)
        if before == now:
            break
    return now


def look(paths: Collection[Path]) -> Seen:
    """The files as they are now; one that is not there is left out."""
    found: Seen = {}
    for path in tuple(paths):
        for file in (*path.glob("*.yaml"), *path.glob("*.yml")) if path.is_dir() else (path,):
            try:
                state = file.stat()
            except OSError:
                continue
            found[file] = (state.st_mtime_ns, state.st_size, state.st_ino)
    return found
