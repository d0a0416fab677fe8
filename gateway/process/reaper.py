"""The reaper: removes folders, control groups, sandboxes and containers even if the gateway itself is killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import anyio
from anyio import to_thread

from gateway.process.spawn import end_process, spawn

_COMMAND = (sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper_process.py")))
_REAPER_STOP_S = 5.0


class Reaper:
    """Kills or removes everything that is still registered when this process ends, however it ends.

    A small helper process (`reaper_process.py`) outlives this one for that purpose.
    """

    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None
        self._registered: dict[str, None] = {}
        self._start_lock = anyio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the helper process, or restarts it if it has died. Called before each child is started."""
        async with self._start_lock:
            if self._process is None or self._process.poll() is not None:
                await self.stop()
                self._process = await to_thread.run_sync(partial(spawn, _COMMAND, stdin=PIPE, stderr=DEVNULL))
                for entry in self._registered:
                    self._send(entry)

    def add(self, group: int) -> None:
        """Registers a process group, such as a sandbox's; programs under a supervisor need no reaper."""
        self._register(f"+{group}")

    def remove(self, group: int) -> None:
        """Removes a process group."""
        self._unregister(f"+{group}")

    def add_folder(self, folder: Path) -> None:
        """Registers a folder to be removed."""
        self._register(_folder_entry(folder))

    def remove_folder(self, folder: Path) -> None:
        """Keeps a folder from being removed."""
        self._unregister(_folder_entry(folder))

    def add_group(self, folder: Path) -> None:
        """Registers a control group, whose processes are killed before it is removed."""
        self._register(f"g{_folder_entry(folder)}")

    def remove_group(self, folder: Path) -> None:
        """Removes a control group."""
        self._unregister(f"g{_folder_entry(folder)}")

    def add_command(self, words: Sequence[str]) -> None:
        """Registers a command that removes something, to be run once."""
        self._register(_command_entry(words))

    def remove_command(self, words: Sequence[str]) -> None:
        """Keeps a command from being run."""
        self._unregister(_command_entry(words))

    def _register(self, entry: str) -> None:
        self._registered[entry] = None
        self._send(entry)

    def _unregister(self, entry: str) -> None:
        self._registered.pop(entry, None)
        self._send(f"-{entry}")

    def _send(self, line: str) -> None:
        # If the helper has died, the next `start` replaces it. The pipe's buffer holds thousands of lines.
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(f"{line}\n".encode())

    async def stop(self) -> None:
        """Ends the helper process, which first kills what is still registered."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            with anyio.move_on_after(_REAPER_STOP_S + 1, shield=True):
                await to_thread.run_sync(end_process, process, _REAPER_STOP_S)


def _folder_entry(folder: Path) -> str:
    return f"/{os.fsencode(folder).hex()}"


def _command_entry(words: Sequence[str]) -> str:
    return f"!{json.dumps(list(words)).encode().hex()}"
