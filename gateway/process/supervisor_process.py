"""Parent process of one program: ends everything that the program started, however it hid itself.

It does so when the program ends, when it is told to, and when the process that started it is gone. Run as a script with
`python -I -S`, so only the standard library is available. Arguments: the descriptor of a socket, the seconds that the
program has to end by itself once that socket has ended, the command.

The supervisor writes `p<pid>` or `e<errno>` to the socket when the program has started or failed to, and `x` when
nothing is left of it. Each byte that it reads there is the number of a signal for the program's group. SIGTERM is
passed on.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_RESTORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores the last two; a shell has background processes ignore the first two, which interrupt what they run."""
_END_S = 5.0
"""How long to kill descendants; each round kills all that there are."""
_ROUND_S = 0.002


def main() -> None:
    """Starts the program, waits for its end, kills what it left behind, and ends as the program did."""
    control, alone_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(control, False)
    _adopt_orphans()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    program = _start(command, control)
    _release_streams()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _signal_group(program, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    status = _serve(program, control, woken, alone_s)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _signal_group(program, signal.SIGKILL)
    _kill_descendants()
    with suppress(OSError):
        os.write(control, b"x\n")
    _end_as(os.waitstatus_to_exitcode(status))


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends; only Linux has that."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(command: list[str], control: int) -> int:
    """Starts the program in a session of its own, and reports its process id."""
    read, write = os.pipe()
    program = os.fork()
    if program == 0:
        _become_program(command, write)
    os.close(write)
    problem = os.read(read, 16)
    os.close(read)
    with suppress(OSError):
        os.write(control, b"e%s\n" % problem if problem else b"p%d\n" % program)
    if problem:
        os._exit(127)
    return program


def _become_program(command: list[str], failures: int) -> NoReturn:
    try:
        os.setsid()
        for number in _RESTORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execvp(command[0], command)  # noqa: S606 (the operator's command, without a shell)
    except OSError as error:
        os.write(failures, b"%d" % (error.errno or 0))
    finally:
        os._exit(127)


def _release_streams() -> None:
    """Leaves the pipes to the program alone, so that they end with it."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _serve(program: int, control: int, woken: int, alone_s: float) -> int:
    """Sends signals as it is told until the program has ended; returns its status."""
    heard, left_s = [control, woken], None
    while True:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    return ended[1]
        ready, _, _ = select.select(heard, [], [], left_s)
        if woken in ready:
            os.read(woken, 4096)
        if control in ready:
            numbers = b""
            with suppress(OSError):
                numbers = os.read(control, 64)
            for number in numbers:
                _signal_group(program, number)
            if not numbers:
                heard.remove(control)
                left_s = alone_s
        elif not ready:
            _signal_group(program, signal.SIGKILL)
            left_s = None


def _signal_group(program: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program, number)


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
    """Ends this process with the exit code of the program, or by the signal that ended it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
