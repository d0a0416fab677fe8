"""How Python programs of the policy are started: in a sandbox, or, where a job accepts that, with limits alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from gateway.sandbox import child_limits

Confinement = Literal["sandbox", "none"]
DESCRIPTIONS: Mapping[Confinement, str] = {
    "sandbox": "a sandbox each: no files, no network, no other processes, limits on all",
    "none": "nothing (`unsafe: true`): they can read secrets and end the gateway",
}
"""What holds programs, as `check` tells it."""
INTERPRETER = os.path.realpath(sys.executable)
PYTHON_COMMAND = (INTERPRETER, "-I", "-S", "-B", "-X", "utf8")


def limit(limits: tuple[int, int, int], command: Sequence[str]) -> tuple[str, ...]:
    """The command line without a sandbox; limits are seconds of CPU, bytes of memory and of a file."""
    return (*PYTHON_COMMAND, child_limits.__file__, *map(str, limits), *command)
