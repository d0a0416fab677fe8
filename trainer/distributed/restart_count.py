"""How often a launcher has started the ranks of a run again, as a metric of the first step that follows."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
