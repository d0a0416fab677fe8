"""Settings of the algorithm: advantages, credit, clips, KL, mismatch correction and aggregation of the loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gateway.config.base import FrozenModel

Name = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "sft"]
Aggregation = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
Share = Annotated[float, Field(ge=0, le=1)]
RESAMPLES = 3
"""How often groups without a learning signal are replaced, by default of dynamic sampling."""


def _count_resamples(value: object) -> object:
    """`dynamic_sampling: true` is how people write it."""
    return value * RESAMPLES if isinstance(value, bool) else value


class ReferenceSettings(FrozenModel):
    """Another reference than the model as the run began: a teacher, from whom the policy learns on what it wrote itself
    (on-policy distillation). Its tokens must be those of the model."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """The teacher's folder, or its name on the hub."""
    url: Annotated[str, Field(pattern="^https?://")] | None = None
    """Or the address of an SGLang server that serves it."""
    timeout_s: PositiveFloat = 120.0
    """Seconds that the server may take for the logprobs of a rollout, before the run ends."""

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if (self.model is None) == (self.url is None):
            raise ValueError("name the teacher's folder (`model`), or the server that serves it (`url`)")
        return self


class KLSettings(FrozenModel):
    """The penalty for moving away from the reference policy."""

    coefficient: NonNegativeFloat = 0.0
    """The weight of the KL term, 1 with a `reference`; with 0, no reference policy is loaded."""
    estimator: Estimator = "k3"
    """How the KL is estimated from sampled tokens; `k1+`, the default with a `reference`, and `k3+` have the unbiased
    gradient, that of k2 times the importance ratio."""
    importance: Literal["engine", "policy", "none"] = "engine"
    """That ratio: `engine`, to the engine that sampled, capped by `mismatch.cap`; `policy`, to the policy before the
    step; `none`, always 1."""
    top_k: NonNegativeInt = 0
    """Above 0: instead of an estimate, the KL over so many tokens, the reference's most likely ones, and all others as
    one; 8 bytes of the host's memory for each of them at each token of a step."""
    in_reward: bool = False
    """Subtract it from the rollout's reward before advantages are computed, instead of adding it to the loss."""
    reference: ReferenceSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _prepare_teacher(cls, values: Any) -> Any:
        has_teacher = isinstance(values, dict) and values.get("reference") is not None
        return {"coefficient": 1.0, "estimator": "k1+", **values} if has_teacher else values

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.top_k and self.in_reward:
            raise ValueError("`top_k` needs a gradient, which a reward (`in_reward`) has not; leave out one of them")
        if self.top_k and not self.coefficient:
            raise ValueError("`top_k` does nothing without a `coefficient`, or a `reference`; give one of them")
        if self.reference is not None and self.estimator == "k1" and not (self.in_reward or self.top_k):
            raise ValueError("`estimator: k1` has no gradient in the loss, so nothing is learned; leave it out (`k1+`)")
        return self


class MismatchSettings(FrozenModel):
    """Correction for logprobs that differ between engine and trainer. The mismatch is measured in any case."""

    truncate: Literal["auto", "token", "sequence", "never"] = "auto"
    """Weights tokens by the ratio of trainer to engine probability, of the token or of its whole sequence (truncated
    importance sampling). `auto` is `token` where the mean difference of logprobs is above 0.001 nats in a sequence,
    unless `reject` is set."""
    cap: PositiveFloat = 2.0
    """The largest such weight."""
    reject: Literal["token", "sequence", "geometric"] | None = None
    """Drops tokens if their ratio, or the product or geometric mean of their sequence's ratios, is out of bounds."""
    bounds: tuple[PositiveFloat, PositiveFloat] = (0.5, 2.0)
    """The smallest and the largest ratio that are not rejected."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.bounds[0] > self.bounds[1]:
            raise ValueError(f"no ratio is within {list(self.bounds)}, so every token would be rejected; swap them")
        return self


class CreditSettings(FrozenModel):
    """How rewards are assigned to turns and tokens."""

    kind: Literal["outcome", "discounted", "scores", "turns", "gae"] = "outcome"
    """`outcome`: every turn gets the rollout's advantage; `discounted`: earlier turns get less; `scores`: the outcome,
    plus what tools and feedback scored from the turn on; `turns`: all rewards from the turn on, compared with siblings
    that got as far; `gae`: compared with a critic."""
    gamma: Share = 1.0
    """The discount per turn; with `gae`, per token."""
    lam: Share = 0.95
    """With `gae`: lambda, how far rewards are trusted over the critic."""
    trained_turns: str = "all"
    """Which turns are trained: `all`, `last`, or your own `module:function` or `file.py:function`, which returns a
    weight for each token of a ledger."""


class OverlongSettings(FrozenModel):
    """The penalty for overlong rollouts, before a limit truncates them; none by default, for `dapo` neither."""

    limit: PositiveInt
    """Tokens of the policy at which the full `penalty` is subtracted."""
    buffer: PositiveInt
    """Tokens before the limit at which the penalty begins."""
    penalty: PositiveFloat = 1.0
    """What is subtracted from the reward at the limit."""

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        if self.buffer > self.limit:
            raise ValueError(f"a buffer of {self.buffer} tokens does not lie within a limit of {self.limit}")
        return self


class AdaptiveEntropySettings(FrozenModel):
    """TRL's `use_adaptive_entropy` (Skywork-OR1): after an optimizer step with an entropy at or below the target there
    is a bonus, and its coefficient rises; after others there is none, and it falls."""

    target: PositiveFloat = 0.2
    """Nats a token."""
    delta: PositiveFloat = 0.005
    """A change of the coefficient."""
    min: NonNegativeFloat = 0.0
    """Its least value."""
    max: NonNegativeFloat = 1.0
    """Its largest value."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"no coefficient lies between a `min` of {self.min} and a `max` of {self.max}")
        return self


class AlgorithmSettings(FrozenModel):
    """How a step learns from its rollouts. Clips and aggregation default to those of the algorithm; all other defaults
    are the same for every algorithm."""

    name: Name = "grpo"
    """The algorithm: its advantages, objective, clip and aggregation. Other parts of a paper have settings of their
    own: DAPO's dynamic sampling is `dynamic_sampling: true`, its length penalty is `overlong`, which needs a limit.
    `sft` raises the logprob of what was written, as far as it was rewarded; it is what `mtrl-train sft` learns traces
    with."""
    clip_low: Share | None = None
    """The importance ratio is clipped at 1 minus this."""
    clip_high: NonNegativeFloat | None = None
    """The importance ratio is clipped at 1 plus this."""
    clip_dual: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """The largest ratio that counts where the advantage is negative (dual clip); by default there is no such bound."""
    aggregate: Aggregation | PositiveFloat | None = None
    """`token`: every token weighs the same; `sequence`: every sequence weighs the same; a number: sums divided by this
    constant length, which is 1024 where an algorithm has a constant and this is left out."""
    count_untrained: bool = False
    """Whether rollouts without a trained token count in means over sequences, as they do in TRL."""
    deviation_epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation that rewards are divided by; TRL and ms-swift add 1e-4."""
    ratio: Literal["sampled", "proximal"] = "sampled"
    """The denominator of the importance ratio for stale tokens: `sampled`, the policy that sampled them; `proximal`,
    the policy before the step, while `mismatch.truncate` weighs the difference between the two (decoupled PPO)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """The weight of an entropy bonus: the entropy of trained tokens, averaged by `aggregate` as losses are;
    the first one with `adaptive_entropy`."""
    adaptive_entropy: AdaptiveEntropySettings | None = None
    kl: KLSettings = KLSettings()
    mismatch: MismatchSettings = MismatchSettings()
    credit: CreditSettings = CreditSettings()
    overlong: OverlongSettings | None = None
    dynamic_sampling: Annotated[NonNegativeInt, BeforeValidator(_count_resamples)] = 0
    """Dynamic sampling: groups whose rewards are all equal are replaced by new ones, at most so many times a step;
    `true` is 3. By default, for `dapo` too, they are kept and contribute nothing to the gradient."""

    @property
    def compares_rollouts(self) -> bool:
        """Whether a rollout's advantage is 0 without others of its task."""
        return self.name not in ("reinforce_pp", "sft") and self.credit.kind not in ("scores", "gae")

    @property
    def distills(self) -> bool:
        """Whether a teacher's KL trains by itself, whatever the rewards are."""
        return self.kl.reference is not None and self.kl.coefficient > 0 and not self.kl.in_reward

    @model_validator(mode="after")
    def _check_proximal(self) -> Self:
        if self.ratio == "proximal" and self.mismatch.truncate in ("never", "auto"):
            raise ValueError(
                "`ratio: proximal` needs `mismatch.truncate`, which weighs stale tokens; set it to `token`"
            )
        return self

    @model_validator(mode="after")
    def _check_first_coefficient(self) -> Self:
        bonus = self.adaptive_entropy
        if bonus is not None and not bonus.min <= self.entropy_coefficient <= bonus.max:
            first = f"the first coefficient, `entropy_coefficient: {self.entropy_coefficient}`"
            raise ValueError(f"{first}, is not within `adaptive_entropy`'s {bonus.min} to {bonus.max}")
        return self
