"""A tool that prints to standard output and reads standard input, which belong to the protocol."""

from __future__ import annotations

import os
import subprocess
import sys


def print_everywhere() -> str:
    """Prints from Python, from the file descriptor and from a child process."""
    sys.stdout.write("noise from Python\n")
    sys.stdout.flush()
    os.write(1, b"noise from below\n")
    subprocess.run([sys.executable, "-c", "print('noise of a child')"], check=True)
    return f"read {sys.stdin.read()!r}"
