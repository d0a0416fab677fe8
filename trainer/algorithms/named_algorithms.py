"""The algorithms by name, GRPO, Dr.GRPO, DAPO, RLOO, REINFORCE++, GSPO, CISPO and SFT: advantages, objective, clip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.packing import Batch, count_by_segment, number_segments, segment_varies, sum_by_segment
from trainer.algorithms.settings import Aggregation

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this: larger ones come from rounding only, and their ratio would overflow."""


EPSILON = 1e-6
"""Added to standard deviations, so that tiny differences are not blown up."""
CONSTANT_LENGTH = 1024
"""What algorithms whose sums are divided by a constant length divide by."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the importance ratio: from 1 - low to 1 + high."""

    low: float
    high: float
    dual: float | None = None
    """The largest ratio that counts where the advantage is negative (dual clip)."""


class Objective(NamedTuple):
    """Token losses, exactly 0 where nothing is trained, and the tokens at which the clip was active."""

    losses_T: Tensor
    clipped_T: Tensor


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named algorithm, with the clip and the aggregation that apply unless settings override them."""

    name: str
    center: Callable[[Tensor, Tensor], Tensor]
    """(rewards_S, group_S) -> rewards_S without their baseline."""
    deviation: Callable[[Tensor, Tensor], Tensor] | None
    """(centered_S, group_S) -> the standard deviation that they are divided by."""
    objective: Callable[[Tensor, Batch, Clip], Objective]
    """(logprobs_T of the new policy, batch, clip) -> the losses to minimise."""
    clip: Clip
    aggregate: Aggregation | float
    whiten: bool = False
    """Normalises the advantages of all tokens of a step to mean 0 and standard deviation 1."""
    is_supervised: bool = False
    """Learns what was written, whoever wrote it: logprobs at sampling play no part."""

    def advantages(self, rewards_S: Tensor, group_S: Tensor, epsilon: float = EPSILON) -> Tensor:
        """Computes the advantage of each rollout."""
        centered_S = self.center(rewards_S, group_S)
        return centered_S if self.deviation is None else centered_S / (self.deviation(centered_S, group_S) + epsilon)


def compute_log_ratio(logprobs_T: Tensor, batch: Batch) -> Tensor:
    """Computes the log ratio of the new to the old policy; 0 where nothing is trained."""
    return torch.where(batch.trained_T, logprobs_T - batch.old_logprobs_T, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_objective(ratio_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the PPO objective: the minimum of the unclipped and the clipped surrogate."""
    unclipped_T = ratio_T * batch.advantages_T
    clipped_T = ratio_T.clamp(1 - clip.low, 1 + clip.high) * batch.advantages_T
    surrogate_T = torch.minimum(unclipped_T, clipped_T)
    if clip.dual is not None:
        floor_T = torch.where(batch.advantages_T < 0, clip.dual * batch.advantages_T, -torch.inf)
        surrogate_T = torch.maximum(surrogate_T, floor_T)
    losses_T = torch.where(batch.trained_T, -surrogate_T, 0)
    return Objective(losses_T, batch.trained_T & (surrogate_T != unclipped_T))


def center_rewards(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Subtracts each group's mean; exactly 0 where all rewards of a group are equal."""
    index_S, groups = number_segments(group_S)
    mean_S = (sum_by_segment(rewards_S, index_S, groups) / count_by_segment(index_S, groups))[index_S]
    return torch.where(segment_varies(rewards_S, index_S, groups), rewards_S - mean_S, 0)


def group_deviation(centered_S: Tensor, group_S: Tensor) -> Tensor:
    """The standard deviation of each one's group."""
    index_S, groups = number_segments(group_S)
    variance = sum_by_segment(centered_S**2, index_S, groups) / (count_by_segment(index_S, groups) - 1).clamp(min=1)
    return variance.sqrt()[index_S]


def ppo_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the PPO objective with one ratio per token."""
    return clip_objective(compute_log_ratio(logprobs_T, batch).exp(), batch, clip)


GRPO = Algorithm("grpo", center_rewards, group_deviation, ppo_objective, Clip(0.2, 0.2), aggregate="sequence")


DR_GRPO = Algorithm("dr_grpo", center_rewards, None, ppo_objective, Clip(0.2, 0.2), aggregate=CONSTANT_LENGTH)


DAPO = Algorithm("dapo", center_rewards, group_deviation, ppo_objective, Clip(0.2, 0.28), aggregate="token")


def overlong_penalty(lengths_S: Tensor, limit: int, margin: int) -> Tensor:
    """What length adds to a reward: 0 up to `limit - margin` tokens, then linearly less, and -1 from the limit on."""
    return -((lengths_S - (limit - margin)) / margin).clamp(0, 1)


def cispo_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the policy gradient weighted by the detached, clipped ratio."""
    ratio_T = compute_log_ratio(logprobs_T, batch).detach().exp()
    weight_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    trained_logprobs_T = torch.where(batch.trained_T, logprobs_T, 0)
    losses_T = torch.where(batch.trained_T, -weight_T * batch.advantages_T * trained_logprobs_T, 0)
    return Objective(losses_T, batch.trained_T & (weight_T != ratio_T))


CISPO = Algorithm("cispo", center_rewards, group_deviation, cispo_objective, Clip(1.0, 4.0), aggregate="token")


def gspo_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Gives each token the sequence's ratio with its own gradient, so that turns may differ in their advantage."""
    log_T = compute_log_ratio(logprobs_T, batch)
    mean_T = batch.mean_by_sequence(log_T.detach(), batch.trained_T)[batch.sequence_T]
    return clip_objective((mean_T + log_T - log_T.detach()).exp(), batch, clip)


GSPO = Algorithm("gspo", center_rewards, group_deviation, gspo_objective, Clip(3e-4, 4e-4), aggregate="sequence")


def leave_one_out(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Computes r - mean of the others, which is (r - mean of all) * n / (n - 1)."""
    index_S, groups = number_segments(group_S)
    sizes_S = count_by_segment(index_S, groups)[index_S]
    return center_rewards(rewards_S, group_S) * sizes_S / (sizes_S - 1).clamp(min=1)


def unclipped_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the plain policy gradient. The unclipped ratio corrects for optimizer steps after the first."""
    losses_T = torch.where(batch.trained_T, -compute_log_ratio(logprobs_T, batch).exp() * batch.advantages_T, 0)
    return Objective(losses_T, torch.zeros_like(batch.trained_T))


RLOO = Algorithm("rloo", leave_one_out, None, unclipped_objective, Clip(0.2, 0.2), aggregate=CONSTANT_LENGTH)


def keep_rewards(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Returns the rewards unchanged: they are whitened once each token has its own."""
    return rewards_S.clone()


def whiten(advantages_T: Tensor, trained_T: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Normalises all trained tokens of a step to mean 0 and standard deviation 1; 0 if all values are equal."""
    trained = advantages_T[trained_T].sort().values  # Sorted, so that rounding does not depend on the order.
    if len(trained) < 2 or bool(trained.max() == trained.min()):
        return torch.zeros_like(advantages_T)
    return torch.where(trained_T, (advantages_T - trained.mean()) / (trained.std() + epsilon), 0)


REINFORCE_PP = Algorithm(
    "reinforce_pp", keep_rewards, None, ppo_objective, Clip(0.2, 0.2), aggregate="token", whiten=True
)


def step_deviation(centered_S: Tensor, group_S: Tensor) -> Tensor:
    """The standard deviation over the whole step, whatever the group."""
    if len(centered_S) < 2:
        return torch.zeros_like(centered_S)
    return centered_S.sort().values.std().expand_as(centered_S)  # Sorted: rounding does not depend on the order.


REINFORCE_PP_BASELINE = Algorithm(
    "reinforce_pp_baseline", center_rewards, step_deviation, ppo_objective, Clip(0.2, 0.2), aggregate="sequence"
)


def supervised_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the negative logprob, weighted by the reward: 1 for a trace."""
    losses_T = torch.where(batch.trained_T, -logprobs_T * batch.advantages_T, 0)
    return Objective(losses_T, torch.zeros_like(batch.trained_T))


SFT = Algorithm("sft", keep_rewards, None, supervised_objective, Clip(0.2, 0.2), aggregate="token", is_supervised=True)


_ALL = (GRPO, DR_GRPO, DAPO, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE, GSPO, CISPO, SFT)
ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALL}
