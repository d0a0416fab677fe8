"""A gateway that is killed cannot clean up, so a small process outlives it for just that."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
from anyio import to_thread

_GUARD = Path(__file__).with_name("guard.py")
_END_S = 2.0


class Reaper:
    """Guards process groups: each one still registered when this process ends, however it ends, is killed."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()
        self._turn = anyio.Lock()

    @property
    def pid(self) -> int | None:
        return self._guard.pid if self._guard else None

    async def start(self) -> None:
        """Starts the guard, at the first child: a gateway without children needs none."""
        async with self._turn:
            if self._guard is None or self._guard.poll() is not None:
                await self.stop()
                self._guard = await to_thread.run_sync(_spawn)
                for group in self._groups:
                    self._say(f"+{group}")

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._say(f"+{group}")

    def remove(self, group: int) -> None:
        self._groups.discard(group)
        self._say(f"-{group}")

    def _say(self, line: str) -> None:
        """A guard that is gone is replaced at the next child; the pipe holds thousands of lines."""
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(BrokenPipeError):
                self._guard.stdin.write(f"{line}\n".encode())

    async def stop(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            with anyio.move_on_after(_END_S + 1, shield=True):
                await to_thread.run_sync(_end, guard)


def _spawn() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(_GUARD)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(  # noqa: S603 (our own interpreter and our own file)
        command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, bufsize=0, start_new_session=True
    )


def _end(guard: subprocess.Popen[bytes]) -> None:
    if guard.stdin is not None:
        guard.stdin.close()
    try:
        guard.wait(_END_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait(_END_S)
