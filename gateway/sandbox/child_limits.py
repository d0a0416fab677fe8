"""Script that limits its own process's resources, then replaces itself by the program to run.

A separate script, since code between fork and exec is unsafe in a process with threads.
Arguments: a user, seconds of CPU, bytes of memory, bytes of a file, then the command. Root changes to the user; as the
first process of its namespace it goes on in a child, since signals could not end it.
"""

import os
import resource
import sys

NOBODY = 65534


def set_limit(resource_id: int, value: int) -> None:
    """Lowers one limit, as far as the system has it."""
    try:
        _, hard = resource.getrlimit(resource_id)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(resource_id, (value, value))
    except (OSError, ValueError):
        # Not every system has every limit; the wall clock is limited everywhere.
        return


def become_user(user: int) -> None:
    """Changes to an unprivileged user, if the process is root's and may."""
    if os.geteuid() == 0 and user != 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def wait_for_child() -> None:
    """Goes on in a child. This process waits for it, and ends as it does; a signal's number is added to 128."""
    child = os.fork()
    if child == 0:
        return
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    user, cpu_s, memory_bytes, file_bytes = (int(text) for text in sys.argv[1:5])
    if os.getpid() == 1:
        wait_for_child()
    become_user(user)
    set_limit(resource.RLIMIT_CPU, cpu_s)
    set_limit(resource.RLIMIT_AS, memory_bytes)
    set_limit(resource.RLIMIT_FSIZE, file_bytes)
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_NOFILE, 64)
    # No further process or thread; the kernel exempts root.
    set_limit(resource.RLIMIT_NPROC, 0)
    os.execv(sys.argv[5], sys.argv[5:])  # noqa: S606 - a fixed command, no shell
