"""Where trainer and engine have one GPU, who has how much of it is planned before the start, and told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trainer.config import PlaySettings, ServingSettings
from trainer.engines import for_sglang
from trainer.policy.memory import GIB, Part, Plan, plan

OWN = 2 * GIB
"""Of a server beside weights, keys and values: its context, graphs and activations. Not measured on a GPU yet."""
MOST = 0.9
"""Of the memory, what a server may be given at the most."""
FRACTION = "--mem-fraction-static"
SAVER = "--enable-memory-saver"


@dataclass(frozen=True, slots=True)
class Placement:
    kind: Literal["together", "beside"]
    plan: Plan
    """What has to fit, at its fullest."""
    fraction: float | None = None
    """Of the memory that is free when the server starts, what it may take; None where it is not the server of a GPU."""

    def __str__(self) -> str:
        if self.fraction is None:
            why = "no server of ours shares a GPU with the trainer, nothing is lent"
            return f"{self.plan}\nplacement: side by side; {why}"
        how = "taking turns, the engine lends its memory to each update" if self.kind == "together" else "side by side"
        return f"{self.plan}\nplacement: {how}; the server may take {self.fraction:.0%} of the GPU that is then free"

    def serving(self, chosen: ServingSettings) -> ServingSettings:
        """What the server is started with; what the operator says of it counts."""
        if self.fraction is None:
            return chosen
        options = chosen.options
        if FRACTION not in options:
            options = (*options, FRACTION, f"{self.fraction:.3f}")
        if self.kind == "together" and SAVER not in options:
            options = (*options, SAVER)
        return chosen.model_copy(update={"placement": self.kind, "options": options})


def placement(
    settings: PlaySettings, folder: Path, room: int | None = None, *, served: bool | None = None
) -> Placement:
    """`served` is whether the trainer's GPU has a server of ours: asked of the machine by default. What is
    planned may not fit."""
    whole = plan(settings, folder, room)
    if not (_served(settings) if served is None else served):
        return Placement("beside", whole)
    own = Part("a server's own", OWN)
    engine, learning = [*whole.parts[:2], own], whole.parts[2:]
    resident = [part for part in learning if not part.passing]
    beside = Plan((*engine, *learning), whole.room)
    turns = max(Plan((*engine, *resident), whole.room), Plan((own, *learning), whole.room), key=lambda one: one.needed)
    asked = settings.serving.placement
    together = asked == "together" or (asked == "auto" and not beside.fits and _synchronous(settings))
    chosen = turns if together else beside
    loaded = sum(part.size for part in learning[:1])
    kept = sum(part.size for part in (resident if together else learning)) - loaded + OWN
    fraction = min(MOST, 1 - kept / (whole.room - loaded)) if chosen.fits else 0.0
    return Placement("together" if together else "beside", chosen, fraction)


def _synchronous(settings: PlaySettings) -> bool:
    """Only then is there a time in which nothing is written."""
    return getattr(settings, "mode", "synchronous") == "synchronous"


def _served(settings: PlaySettings) -> bool:
    if not torch.cuda.is_available() or settings.serving.replicas > 1:
        return False
    return settings.engine == "sglang" or (settings.engine == "auto" and for_sglang())
