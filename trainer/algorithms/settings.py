"""Settings of the algorithm: advantages, credit, clips, KL, mismatch correction and aggregation of the loss."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from gateway.config.base import FrozenModel

Name = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "sft"]
Aggregation = Literal["token", "sequence", "constant"]
Estimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
Share = Annotated[float, Field(ge=0, le=1)]


class KLSettings(FrozenModel):
    """The penalty for moving away from the reference policy."""

    coefficient: NonNegativeFloat = 0.0
    """The weight of the KL term; with 0, no reference policy is loaded."""
    estimator: Estimator = "k3"
    """How the KL is estimated from sampled tokens; `k1+` and `k3+` have the unbiased gradient, that of k2."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss; `reward`: subtracted from the rollout's reward before advantages are computed."""


class MismatchSettings(FrozenModel):
    """Correction for logprobs that differ between engine and trainer. The mismatch is measured in any case."""

    truncate: Literal["token", "sequence"] | None = None
    """Weights tokens by the ratio of trainer to engine probability, of the token or of its whole sequence (truncated
    importance sampling)."""
    cap: PositiveFloat = 2.0
    """The largest such weight."""
    reject: Literal["token", "sequence", "geometric"] | None = None
    """Drops tokens if their ratio, or the product or geometric mean of their sequence's ratios, is out of bounds."""
    low: PositiveFloat = 0.5
    """The smallest ratio that is not rejected."""
    high: PositiveFloat = 2.0
    """The largest ratio that is not rejected."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}), so every token would be rejected")
        return self


class CreditSettings(FrozenModel):
    """How rewards are assigned to turns and tokens."""

    kind: Literal["outcome", "discounted", "scores", "turns", "gae"] = "outcome"
    """`outcome`: every turn gets the rollout's advantage; `discounted`: earlier turns get less; `scores`: the outcome,
    plus what tools and feedback scored from the turn on; `turns`: all rewards from the turn on, compared with siblings
    that got as far; `gae`: compared with a critic."""
    discount: Share = 1.0
    """The discount per turn; with `gae`, per token."""
    trust: Share = 0.95
    """With `gae`: how far rewards are trusted over the critic, called lambda elsewhere."""
    rounds: str = "all"
    """Which turns are trained: `all`, `last`, or your own `module:function` or `file.py:function`, which returns a
    weight for each token of a ledger."""


class OverlongSettings(FrozenModel):
    """The penalty for overlong rollouts, before a limit truncates them."""

    limit: PositiveInt
    """Tokens of the policy at which the full `cost` is subtracted."""
    margin: PositiveInt
    """Tokens before the limit at which the penalty begins."""
    cost: PositiveFloat = 1.0
    """What is subtracted from the reward at the limit."""

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        if self.margin > self.limit:
            raise ValueError(f"a margin of {self.margin} tokens does not lie within a limit of {self.limit}")
        return self


class AlgorithmSettings(FrozenModel):
    """How a step learns from its rollouts. Clips and aggregation default to those of the algorithm; all other defaults
    are the same for every algorithm."""

    name: Name = "grpo"
    """The algorithm: its advantages, objective, clip and aggregation. Other parts of a paper have settings of their
    own: DAPO's dynamic sampling is `dynamic: true`, its length penalty is `overlong`, which needs a limit. `sft` raises
    the logprob of what was written, as far as it was rewarded; it is what `mtrl-train sft` learns traces with."""
    clip_low: Share | None = None
    """The importance ratio is clipped at 1 minus this."""
    clip_high: NonNegativeFloat | None = None
    """The importance ratio is clipped at 1 plus this."""
    clip_dual: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """The largest ratio that counts where the advantage is negative (dual clip); by default there is no such bound."""
    aggregate: Aggregation | None = None
    """`token`: every token weighs the same; `sequence`: every sequence weighs the same; `constant`: sums divided by a
    constant length."""
    length: PositiveInt = 1024
    """The length that `constant` divides by."""
    ratio: Literal["sampled", "proximal"] = "sampled"
    """The denominator of the importance ratio for stale tokens: `sampled`, the policy that sampled them; `proximal`,
    the policy before the step, while `mismatch.truncate` weighs the difference between the two (decoupled PPO)."""
    kl: KLSettings = KLSettings()
    mismatch: MismatchSettings = MismatchSettings()
    credit: CreditSettings = CreditSettings()
    overlong: OverlongSettings | None = None
    """The length penalty. There is none by default, for `dapo` neither."""
    dynamic: bool = False
    """Dynamic sampling: groups whose rewards are all equal are replaced by new ones, up to `draws` times. By default,
    for `dapo` too, they are kept and contribute nothing to the gradient."""

    @model_validator(mode="after")
    def _check_proximal(self) -> Self:
        if self.ratio == "proximal" and self.mismatch.truncate is None:
            raise ValueError(
                "`ratio: proximal` needs `mismatch.truncate`, which weighs stale tokens; set it to `token`"
            )
        return self
