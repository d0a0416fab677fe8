"""Script that limits its own process's resources, then replaces itself by the program to run.

A separate script, since code between fork and exec is unsafe in a process with threads.
Arguments: seconds of CPU, bytes of memory, bytes of a file, then the command.
"""

import os
import resource
import sys


def set_limit(resource_id: int, value: int) -> None:
    """Lowers one limit, as far as the system has it."""
    try:
        _, hard = resource.getrlimit(resource_id)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(resource_id, (value, value))
    except (OSError, ValueError):
        # Not every system has every limit; the wall clock is limited everywhere.
        return


if __name__ == "__main__":
    cpu_s, memory_bytes, file_bytes = (int(text) for text in sys.argv[1:4])
    set_limit(resource.RLIMIT_CPU, cpu_s)
    set_limit(resource.RLIMIT_AS, memory_bytes)
    set_limit(resource.RLIMIT_FSIZE, file_bytes)
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_NOFILE, 64)
    # No further process or thread; the kernel exempts root.
    set_limit(resource.RLIMIT_NPROC, 0)
    os.execv(sys.argv[4], sys.argv[4:])  # noqa: S606 - a fixed command, no shell
