"""An engine that was given weights must find a probe as likely as the trainer does: otherwise it has others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite

from trainer.engine.base import EXACT, Agreement, EngineError

FAR: Mapping[str, float] = {"float32": 0.01}
"""Nats, that rounding alone never makes."""
FAR_ROUNDED = 0.5
"""Of other types of numbers."""
CLEAR = 4.0
"""Times as far as a server is from the weights before, must the trainer be from them: nearer, it may be rounding."""


def agreement(server: Sequence[float], trainer: Sequence[float]) -> Agreement:
    if len(server) != len(trainer):
        raise EngineError(f"SGLang told {len(server)} logprobs of a prompt with {len(trainer)}")
    apart = [abs(one - other) for one, other in zip(server, trainer, strict=True)]
    apart = [one if isfinite(one) else inf for one in apart]  # The largest of numbers and no numbers is any of them.
    return Agreement(max(apart), sum(apart) / len(apart))


def agreed(
    url: str, server: Sequence[float], trainer: Sequence[float], before: Sequence[float] | None, dtype: str
) -> Agreement:
    """Raises where the server has other weights, or those that the trainer had before."""
    now = agreement(server, trainer)
    if not now.most <= FAR.get(dtype, FAR_ROUNDED):
        told = f"its logprobs differ from the trainer's by up to {now.most:.3g} nats"
        raise EngineError(f"SGLang at {url} has other weights than were published: {told}")
    if before is not None and agreement(trainer, before).most > max(EXACT, CLEAR * agreement(server, before).most):
        raise EngineError(f"SGLang at {url} has the weights of the time before, and says they are those just published")
    return now
