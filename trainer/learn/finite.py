"""A number that is none is traced to the rollout that it came from, before it can reach the weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

REMEDY = "begin again with a lower `update.lr`; `--model RUN/checkpoints/STEP` begins with what was still well"


class NotFinite(ValueError):
    """NaN or infinity where a number is needed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}\n  remedy: {REMEDY}")


def finite_S(what: str, values_S: Tensor, names_S: Sequence[str]) -> None:
    """Complains of the first rollout whose value is no number."""
    wrong_S = ~values_S.isfinite()
    if bool(wrong_S.any()):
        first = int(wrong_S.nonzero()[0])
        raise NotFinite(f"rollout {names_S[first]} has {what} {float(values_S[first])}; a number is needed")
