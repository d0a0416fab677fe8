"""Runs in the child, before the program: takes its limits upon itself, then becomes the program.

A script of its own rather than a function run after the fork, which is not safe in a process with threads.
Arguments: CPU seconds, bytes of memory, bytes of a file, then the command.
"""

import os
import resource
import sys


def limit(kind: int, value: int) -> None:
    try:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    except (OSError, ValueError):
        # Not every system has every limit; the wall clock holds everywhere.
        return


if __name__ == "__main__":
    cpu_s, memory_bytes, file_bytes = (int(text) for text in sys.argv[1:4])
    limit(resource.RLIMIT_CPU, cpu_s)
    limit(resource.RLIMIT_AS, memory_bytes)
    limit(resource.RLIMIT_FSIZE, file_bytes)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, 64)
    # No further process or thread. The kernel does not hold root to it.
    limit(resource.RLIMIT_NPROC, 0)
    os.execv(sys.argv[4], sys.argv[4:])  # noqa: S606 - a fixed command, no shell
