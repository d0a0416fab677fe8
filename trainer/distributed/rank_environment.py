"""How ranks are named by their launcher, how often they were started again, and the exit code that a launcher reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.errors import ConfigError
from trainer.distributed.rank_output import KEPT

if TYPE_CHECKING:
    from trainer.distributed.settings import DistributedSettings


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


RESTARTS = "MTRL_RESTARTS"
"""Set by our own launchers: `--ranks` and `--ray`."""
RESTARTS_KEY = "restarts"
"""In the state of a checkpoint: the total when it was written."""
COUNTERS = (RESTARTS, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables in which launchers say how often they have started this job again; the first one that is set counts."""


def count_restarts(variables: Mapping[str, str] = os.environ) -> int:
    """Restarts of the ranks by their launcher, whose own start was that of a user."""
    text = next((variables[name] for name in COUNTERS if name in variables), "0")
    return int(text) if text.isdecimal() else 0


class RankRestarts:
    """The restarts since the checkpoint from which a run goes on, and those since its launcher began."""

    def __init__(self, ranks: int, total: int, saved: int = 0) -> None:
        """`saved` is the total when the checkpoint was written, maybe by a launcher of an earlier start of the run."""
        self.ranks, self.total = ranks, total
        self._unreported = total - saved if total > saved else total

    def take_metrics(self) -> dict[str, float]:
        """Restarts since the last call. A step that is made again after a further one reports all of them."""
        unreported, self._unreported = self._unreported, 0
        return {"distributed/restarts": float(unreported)}

    def describe(self) -> str:
        """The state of the ranks in words."""
        return f"{self.ranks} of {self.ranks} up" + (f", {self.total} restarts" if self.total else "")


LAUNCHED = "MTRL_RANK_PIPE"
"""Set in the environment of a rank that `--ranks N` started; its standard input ends with its parent."""
JOB_LAUNCHERS = ("TORCHELASTIC_RUN_ID", KEPT)
"""Set by torchrun, and by Ray and in rendered jobs: one rank of theirs trains alone, since it may be all that is left.
Elsewhere a process alone, such as a single task of srun, may start ranks itself."""
FIRST_SLURM_PORT = 20000
SLURM_PORTS = 20000


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process's place among the ranks, and where they meet."""

    rank: int
    size: int
    local_rank: int
    """Its place among the ranks of its machine."""
    host: str
    port: int
    launcher: str


def detect_environment(variables: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """The ranks that a launcher started; None if this process was started alone, and may start ranks itself."""
    if "RANK" in variables and "WORLD_SIZE" in variables:
        launcher = "--ranks" if LAUNCHED in variables else "torchrun"
        rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
        local_rank = _number(variables, "LOCAL_RANK", rank)
        host, port = variables.get("MASTER_ADDR", ""), _number(variables, "MASTER_PORT", 0)
    elif "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables:  # The latter is set by srun alone.
        launcher = "srun"
        rank, size = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_STEP_NUM_TASKS")
        local_rank = _number(variables, "SLURM_LOCALID", rank)
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
        host = variables.get("MASTER_ADDR") or first_node(nodes)
        step = _number(variables, "SLURM_JOB_ID", 0) * 31 + _number(variables, "SLURM_STEP_ID", 0)
        port = _number(variables, "MASTER_PORT", FIRST_SLURM_PORT + step % SLURM_PORTS)
    else:
        return None
    if size == 1 and not any(name in variables for name in JOB_LAUNCHERS):
        return None
    if not 0 <= rank < size:
        raise ConfigError(f"{launcher} gave this process rank {rank} of {size}", remedy="correct its environment")
    if not host or not port:
        remedy = "set MASTER_ADDR and MASTER_PORT to an address of rank 0's machine and a free port there"
        raise ConfigError(f"{launcher} did not tell where the ranks meet", remedy=remedy)
    return RankEnvironment(rank, size, local_rank, host, port, launcher)


def count_local_ranks(settings: DistributedSettings, variables: Mapping[str, str] = os.environ) -> int:
    """The ranks on rank 0's machine, which train on its first GPUs; where no variable tells, all ranks."""
    environment = detect_environment(variables)
    if environment is None:
        return settings.ranks
    if "LOCAL_WORLD_SIZE" in variables:
        return _number(variables, "LOCAL_WORLD_SIZE")
    match = re.match(r"\d+", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))  # Such as `4(x2),1`.
    return int(match[0]) if match else environment.size


def first_node(nodes: str) -> str:
    """The first host of a list as SLURM writes it, such as `gpu[03-05,9],cpu1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        remedy = "start with torchrun or srun, or remove RANK and WORLD_SIZE from the environment"
        raise ConfigError(f"the environment variable {name} is {text!r}, not a number", remedy=remedy) from None
