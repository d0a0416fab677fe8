"""Rank 0's exit code, by which launchers know whether to start the ranks again, and the file that tells them of it.

srun and torchrun do not say which rank ended with which code.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE_VARIABLE = "MTRL_EXIT_CODE_FILE"
"""Set by a job's script: where rank 0 writes its exit code."""
NOT_AGAIN = 2
"""The run would end alike if it were started again: wrong settings, numbers that are not finite, too little memory.
`pod_start.sh` and `slurm_job.sh` know this number, too."""
_files: list[Path] = []


def take_file() -> None:
    """Keeps the file's name, and removes it from the environment: what this process starts has codes of its own."""
    file = os.environ.pop(FILE_VARIABLE, "")
    _files[:] = [Path(file)] if file and os.environ.get("RANK", "0") == "0" else []


def write_exit_code(code: int) -> None:
    """Writes the code with which this process is about to end, if its launcher wants it and this is rank 0."""
    for file in _files:
        with suppress(OSError):
            file.write_text(f"{code}\n", encoding="ascii")
