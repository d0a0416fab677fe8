"""How rewards become a loss: frozen, complete, nothing unknown let through. Field descriptions document it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from gateway.config.models import Frozen

Name = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo"]
Aggregation = Literal["token", "sequence", "constant"]
Estimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
Share = Annotated[float, Field(ge=0, le=1)]


class KLSettings(Frozen):
    """What it costs to leave the reference policy."""

    coefficient: NonNegativeFloat = 0.0
    """0 asks for no reference policy at all."""
    estimator: Estimator = "k3"
    """How the distance is told from the sampled token; `k1+` and `k3+` have the true gradient, which is that of k2."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term beside the objective; `reward`: taken off the rollout's reward before it is compared."""


class MismatchSettings(Frozen):
    """What is done where engine and trainer disagree on how likely a token was. It is measured in any case."""

    truncate: Literal["token", "sequence"] | None = None
    """Tokens are weighted by trainer's over engine's likelihood, of the token or of its whole sequence."""
    cap: PositiveFloat = 2.0
    """The largest such weight."""
    reject: Literal["token", "sequence", "geometric"] | None = None
    """Tokens are left out whose ratio, or whose sequence's product or geometric mean of ratios, is out of bounds."""
    low: PositiveFloat = 0.5
    """The smallest ratio that is not rejected."""
    high: PositiveFloat = 2.0
    """The largest ratio that is not rejected."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}), and every token would be rejected")
        return self


class CreditSettings(Frozen):
    """Which turn is credited with what."""

    kind: Literal["outcome", "discounted", "scores", "turns", "gae"] = "outcome"
    """`outcome`: all turns alike; `discounted`: earlier turns less; `scores`: the outcome, and what tools and feedback
    scored from the turn on; `turns`: all rewards from the turn on, against siblings that got as far; `gae`: against a
    critic."""
    discount: Share = 1.0
    """What a reward one turn later counts now; with `gae`, one token later."""
    trust: Share = 0.95
    """`gae`: how far rewards are believed rather than the critic; lambda elsewhere."""
    rounds: str = "all"
    """Which turns are trained: `all`, `last`, or `module:function` or `file.py:function`, which weighs each token of a
    ledger."""


class OverlongSettings(Frozen):
    """What length costs before it costs everything."""

    limit: PositiveInt
    """Tokens of the policy's own at which a rollout has lost `cost`."""
    margin: PositiveInt
    """Tokens before the limit at which the loss begins."""
    cost: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.margin > self.limit:
            raise ValueError(f"a margin of {self.margin} tokens does not lie within a limit of {self.limit}")
        return self


class AlgorithmSettings(Frozen):
    """How a step learns from its rollouts. Clips and sums that are left out are as the algorithm has them; all else
    is as said here, whatever the algorithm."""

    name: Name = "grpo"
    """Advantages, objective, clip and sum. What else a paper has goes by settings of its own: DAPO's dynamic sampling
    by `dynamic: true`, what it takes off for length by `overlong`, which needs a limit."""
    clip_low: Share | None = None
    """The ratio to the old policy counts down to 1 less this."""
    clip_high: NonNegativeFloat | None = None
    """It counts up to 1 and this."""
    clip_dual: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Where an advantage is below 0, the ratio counts up to this at the most; by default there is no such end."""
    aggregate: Aggregation | None = None
    """`token`: every token alike; `sequence`: every sequence alike; `constant`: sums over a length always the same."""
    length: PositiveInt = 1024
    """The length by which `constant` divides."""
    ratio: Literal["sampled", "proximal"] = "sampled"
    """What the new policy is held against where earlier weights sampled a token: `sampled`, the policy that did;
    `proximal`, the policy before the step, and `mismatch.truncate` weighs what lies between the two (decoupled)."""
    kl: KLSettings = KLSettings()
    mismatch: MismatchSettings = MismatchSettings()
    credit: CreditSettings = CreditSettings()
    overlong: OverlongSettings | None = None
    """By default length costs nothing, with `dapo` as with all others."""
    dynamic: bool = False
    """Groups whose rewards are all the same are replaced by others, up to `draws` times. By default they are kept and
    teach nothing, with `dapo` as with all others."""

    @model_validator(mode="after")
    def _weighed(self) -> Self:
        if self.ratio == "proximal" and self.mismatch.truncate is None:
            raise ValueError(
                "`ratio: proximal` leaves it to `mismatch.truncate` to weigh what is stale; set it to token"
            )
        return self
