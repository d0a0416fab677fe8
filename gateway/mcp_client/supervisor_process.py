"""Parent process of one stdio server: ends everything that the server started when it exits, however it hid itself.

Run as a script with `python -I -S`, so only the standard library is available. Arguments: the descriptor for reports,
then the server's command. It reports `p<pid>` or `e<errno>` when the server has started or failed to, and `x` when
nothing is left of it. SIGTERM is passed on to the server; SIGUSR1 kills it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

KILL_SIGNAL = signal.SIGUSR1
_PR_SET_CHILD_SUBREAPER = 36
_HANDLED = (signal.SIGTERM, KILL_SIGNAL)
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_END_S = 5.0
"""How long to kill descendants; each round kills all that there are."""
_ROUND_S = 0.002


def main() -> None:
    """Starts the server, waits for its end, kills what it left behind, and ends as the server did."""
    reports, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(reports, False)
    _adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    server = _start(command, reports)
    _release_streams()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _signal_group(server, signal.SIGTERM))
    signal.signal(KILL_SIGNAL, lambda *_: _signal_group(server, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    status = _wait_for(server)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    _signal_group(server, signal.SIGKILL)
    _kill_descendants()
    with suppress(BrokenPipeError):
        os.write(reports, b"x\n")
    _end_as(os.waitstatus_to_exitcode(status))


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends; only Linux has that."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(command: list[str], reports: int) -> int:
    """Starts the server in a session of its own, and reports its process id."""
    read, write = os.pipe()
    server = os.fork()
    if server == 0:
        _become_server(command, write)
    os.close(write)
    problem = os.read(read, 16)
    os.close(read)
    os.write(reports, b"e%s\n" % problem if problem else b"p%d\n" % server)
    if problem:
        os._exit(127)
    return server


def _become_server(command: list[str], failures: int) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them.
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        os.execvp(command[0], command)  # noqa: S606 (the operator's command, without a shell)
    except OSError as error:
        os.write(failures, b"%d" % (error.errno or 0))
    finally:
        os._exit(127)


def _release_streams() -> None:
    """Leaves the pipes to the server alone, so that they end with it."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _wait_for(server: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == server:
            return status


def _signal_group(server: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(server, number)


def _kill_descendants() -> None:
    """Kills children until there are none: those of a killed child become children of this process."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_ROUND_S)


def _children() -> Iterator[int]:
    me = str(os.getpid()).encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of the program stands in parentheses, and may have any character.
                if file.read().rpartition(b")")[2].split()[1] == me:
                    yield int(name)


def _end_as(code: int) -> NoReturn:
    """Ends this process with the exit code of the server, or by the signal that ended it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
