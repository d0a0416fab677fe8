"""Copies what a rank prints into its log in the run's folder, also what libraries print, where no launcher does so."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

from gateway.process.spawn import spawn

KEPT = "MTRL_OUTPUT_KEPT"
"""Set in the environment of a rank whose launcher writes its output into the run's folder."""


def rank_log(folder: Path, rank: int) -> Path:
    """The log of a rank in a run's log folder."""
    return folder / f"rank-{rank}.log"


def copy_output(log: Path) -> None:
    """Has all further output go to the log, too. A terminal stays one, since rank 0 draws its progress there."""
    if os.environ.get(KEPT) or sys.stdout.isatty():
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        with suppress(OSError):  # There is no `tee`, or the stream is closed: the launcher has the output still.
            # It ends with its input, in a session of its own: the last words of a rank that is killed are copied.
            copier = spawn(["tee", "-a", str(log)], stdin=PIPE, stdout=descriptor, stderr=DEVNULL)
            if copier.stdin is not None:
                os.dup2(copier.stdin.fileno(), descriptor)
                copier.stdin.close()
