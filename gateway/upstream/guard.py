"""Whoever holds the other end of my standard input is dead once it ends: then nothing it started may live on.

Run as a script with `python -I -S`, so it knows only the standard library. Lines: `+pgid` to guard, `-pgid` to forget.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line[:1] == b"+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
