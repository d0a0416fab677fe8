"""A tool that prints where it should not."""

from __future__ import annotations

import os
import subprocess
import sys


def chatter() -> str:
    """Prints in every way there is."""
    sys.stdout.write("noise from Python\n")
    sys.stdout.flush()
    os.write(1, b"noise from below\n")
    subprocess.run([sys.executable, "-c", "print('noise of a child')"], check=True)
    return f"read {sys.stdin.read()!r}"
