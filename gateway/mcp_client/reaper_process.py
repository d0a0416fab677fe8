"""Helper process of the reaper: kills what is registered, and removes folders, when its standard input ends.

Standard input ends when the gateway dies. Run as a script with `python -I -S`, so only the standard library is
available. Each input line registers something, or removes it with `-` before it: `+pgid` a process group, `*pid` a
supervisor (`supervisor_process.py`), `/folder` a folder, whose name is in hexadecimal, `g/folder` a control group, and
`!command` a command that removes something, its words as JSON in hexadecimal.
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

_SUPERVISORS_S = 4.0
"""How long supervisors may take to end their servers."""
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
    supervisors = [int(entry[1:]) for entry in registered if entry[:1] == b"*"]
    groups = [int(entry[1:]) for entry in registered if entry[:1] == b"+"]
    for pid in supervisors:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    for group in groups:
        _kill_group(group)
    _wait_for(supervisors)
    for pid in supervisors:
        _kill_group(pid)
    _remove_rest(registered)


def _remove_rest(registered: dict[bytes, None]) -> None:
    """Removes what is no process; commands do so beside each other."""
    commands = [_start_command(entry[1:]) for entry in registered if entry[:1] == b"!"]
    for entry in registered:
        if entry[:1] == b"/":
            shutil.rmtree(_folder(entry[1:]), ignore_errors=True)
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


def _remove_group(folder: str) -> None:
    """Kills the processes of a control group until it is empty and can be removed."""
    deadline = time.monotonic() + _SUPERVISORS_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        with suppress(OSError), open(f"{folder}/cgroup.procs") as file:
            for pid in file.read().split():
                with suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            os.rmdir(folder)
        time.sleep(_POLL_S)


def _wait_for(pids: list[int]) -> None:
    deadline = time.monotonic() + _SUPERVISORS_S
    while time.monotonic() < deadline and any(map(_is_alive, pids)):
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):
        return False


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
