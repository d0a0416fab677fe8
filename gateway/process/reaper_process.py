"""Helper process of the reaper: kills what is registered, and removes folders, when its standard input ends.

Standard input ends when the gateway dies. Run as a script with `python -I -S`, so only the standard library is
available. Each input line registers something, or removes it with `-` before it: `+pgid` a process group, `/folder` a
folder, whose name is in hexadecimal, `g/folder` a control group, and `!command` a command that removes something, its
words as JSON in hexadecimal.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

_REMOVE_S = 4.0
"""How long the processes that use a folder may take to end: their supervisors find the end of the gateway, too."""
_COMMANDS_S = 30.0
_POLL_S = 0.01


def main() -> None:
    """Reads registrations until standard input ends, then kills and removes everything that is left."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    registered: dict[bytes, None] = {}
    for line in sys.stdin.buffer:
        entry = line.strip()
        if entry[:1] == b"-":
            registered.pop(entry[1:], None)
        else:
            registered[entry] = None
    for entry in registered:
        if entry[:1] == b"+":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(entry[1:]), signal.SIGKILL)
    _remove_rest(registered)


def _remove_rest(registered: dict[bytes, None]) -> None:
    """Removes what is no process; commands do so beside each other."""
    commands = [_start_command(entry[1:]) for entry in registered if entry[:1] == b"!"]
    for entry in registered:
        if entry[:1] == b"/":
            _remove_folder(_folder(entry[1:]))
        if entry[:2] == b"g/":
            _remove_group(_folder(entry[2:]))
    for command in commands:
        with suppress(subprocess.TimeoutExpired):
            if command is not None:
                command.wait(_COMMANDS_S)


def _start_command(text: bytes) -> subprocess.Popen[bytes] | None:
    null = subprocess.DEVNULL
    with suppress(OSError, ValueError):
        return subprocess.Popen(  # noqa: S603 - a command of the gateway
            json.loads(bytes.fromhex(text.decode())), stdin=null, stdout=null, stderr=null
        )
    return None


def _folder(name: bytes) -> str:
    return os.fsdecode(bytes.fromhex(name.decode()))


def _remove_folder(folder: str) -> None:
    """Removes a folder, in which processes may still write."""
    deadline = time.monotonic() + _REMOVE_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_POLL_S)


def _remove_group(folder: str) -> None:
    """Kills the processes of a control group until it is empty and can be removed."""
    deadline = time.monotonic() + _REMOVE_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        with suppress(OSError), open(f"{folder}/cgroup.procs") as file:
            for pid in file.read().split():
                with suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            os.rmdir(folder)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
