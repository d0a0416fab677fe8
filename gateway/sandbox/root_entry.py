"""Enters a box that has a root: sets its limits, gives up all rights, and goes on as the command.

Nothing of the root runs or is read before that, since what lies there may be the policy's. Run as a script inside, by
the interpreter of `root_interpreter.py`: its argument is JSON, and the command follows.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from contextlib import suppress

NO_SUID, NO_DEVICES = 2, 4
DROP_BOUND, NO_NEW_RIGHTS, AMBIENT, CLEAR_ALL = 24, 38, 47, 4
CAPABILITIES_VERSION, LAST_CAPABILITY = 0x20080522, 63
STARTED, MOUNTS = 5, 8
ENDED_INSIDE = 113
"""As in `command_server.py`."""
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Enters."""
    given = json.loads(sys.argv[1])
    check(LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(NO_SUID | NO_DEVICES), given["shared"].encode()))
    if given["user"]:
        stay_first()
    for name, value in given["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    drop_rights(given["user"])
    with suppress(OSError):
        os.makedirs(given["workdir"], exist_ok=True)
    try:
        os.chdir(given["workdir"])
    except OSError:  # An earlier box of the rollout may have made it something else.
        os.chdir("/")
    os.environ["PWD"] = os.getcwd()  # By which some programs know where they are.
    os.environ.update({name: os.environ.pop(held) for held, name in given["held"].items()})
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them.
        signal.signal(number, signal.SIG_DFL)
    os.write(STARTED, b"\n")
    for descriptor in (STARTED, MOUNTS):
        os.close(descriptor)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command of the box
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")


def stay_first() -> None:
    """Goes on in a child: root's process 1 stays, which nobody else can signal or limit, and ends after it."""
    if (child := os.fork()) == 0:
        return
    os.closerange(0, MOUNTS + 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)
    os._exit(ENDED_INSIDE)


def drop_rights(user: int) -> None:
    """Becomes an unprivileged user without capabilities, and with no way to get any."""
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(DROP_BOUND, capability, 0, 0, 0)  # It fails for those that the kernel does not have.
    check(LIBC.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0))
    check(LIBC.prctl(AMBIENT, CLEAR_ALL, 0, 0, 0))
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, none = struct.pack("=Ii", CAPABILITIES_VERSION, 0), bytes(24)
    check(LIBC.capset(header, none))


def check(result: int) -> None:
    """Raises OSError with libc's error if a call failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
