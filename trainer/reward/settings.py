"""What a rollout is worth, as it is set: frozen, complete. Field descriptions are the documentation."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PositiveFloat, model_validator

from gateway.config.models import Frozen

Name = Annotated[str, Field(pattern=r"^\w[\w./-]*$")]
TAKEN = frozenset({"mean", "std", "failed"})
"""Metrics beside which a component stands as `reward/NAME`."""


class ComponentSettings(Frozen):
    """One function, and what its number counts."""

    function: Annotated[str, Field(min_length=1)]
    """A shipped one (`answer`, `exact`, `outcome`, `tools`, `feedback`, `calc_reward`, `efficiency`, `tool_quality`),
    or one's own: `module:name`, or `folder/rewards.py:name`. It is given a `trainer.reward.attempt:Attempt` and gives a
    number. It may be async, and is then awaited in an event loop of its own, the same from call to call: what it opens
    there is not to be shared with another function, nor with tools."""
    weight: float = 1.0
    """What its number is multiplied by; 0 measures and does not reward."""
    args: dict[str, Any] = {}
    """Passed on to the function by keyword."""
    batched: bool = False
    """The function is given a list, all attempts of a group, and gives a list of numbers in the same order."""
    timeout_s: PositiveFloat = 30.0
    """Seconds until what it was asked for is left out. An async function that blocks holds up what else it was asked at
    that time, which is left out with it, and nothing else."""


class RewardSettings(Frozen):
    """The reward is the weighted sum of components; each is a metric of its own."""

    components: Annotated[dict[Name, ComponentSettings], Field(min_length=1)] = {
        "answer": ComponentSettings(function="answer")
    }
    """By name."""
    success: str | None = None
    """The component that tells whether a rollout succeeded; the first by default."""
    success_at: float = 1.0
    """It did where that component, unweighted, reaches this."""

    @property
    def telling(self) -> str:
        """The component that tells success."""
        return self.success or next(iter(self.components))

    @model_validator(mode="after")
    def _named(self) -> Self:
        if taken := sorted(TAKEN & set(self.components)):
            raise ValueError(f"{taken[0]!r} is a metric of all components together; name the component otherwise")
        if self.telling not in self.components:
            raise ValueError(f"success is {self.success!r}, which is none of {', '.join(self.components)}")
        return self
