"""What a lesson has to be told before anything in it is worth something; no gradient goes this way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from trainer.learn.batch import Batch, Row, pack
from trainer.learn.kl import distance
from trainer.learn.lesson import Draft, Lesson
from trainer.learn.settings import Estimator
from trainer.policy.critic import Critic
from trainer.policy.cut import micro
from trainer.policy.policy import Policy
from trainer.policy.reader import Reads


@torch.no_grad()
def distances(
    lesson: Lesson, policy: Policy, reference: Reads, estimator: Estimator, temperature: float
) -> list[float]:
    """Of each rollout, how far what the policy wrote had gone from its reference when it was written."""
    found = [0.0] * len(lesson.rewards)
    for drafts, batch in _batches(lesson.drafts, policy):
        near = reread(batch, reference, temperature)
        far_S = batch.total_S(distance(batch.engine_T, replace(batch, ref_T=near), estimator)).tolist()
        for draft, far in zip(drafts, far_S, strict=True):
            found[draft.rollout] += far
    return found


@torch.no_grad()
def values(drafts: Sequence[Draft], policy: Policy, critic: Critic) -> list[list[float]]:
    """Of each draft's tokens, what the critic expects before it is written."""
    found: list[list[float]] = []
    for near, batch in _batches(drafts, policy):
        values_T = critic.values(batch.ids_T, batch.sequence_T, batch.images).tolist()
        stops = accumulate((len(draft.ids) for draft in near), initial=0)
        found += [values_T[start:stop] for start, stop in pairwise(stops)]
    return found


@torch.no_grad()
def reread(batch: Batch, reader: Reads, temperature: float) -> torch.Tensor:
    """What another policy, or this one before it moved, says of the trained tokens."""
    return reader.read(batch.ids_T, batch.sequence_T, batch.trained_T, temperature, batch.images).logprobs_T


def _batches(drafts: Sequence[Draft], policy: Policy) -> Iterator[tuple[Sequence[Draft], Batch]]:
    """Drafts as rows that are worth nothing yet."""
    for span in micro([len(draft.ids) for draft in drafts], policy.settings.tokens):
        near = drafts[span]
        yield near, pack([_idle(one) for one in near]).to(policy.device)


def _idle(one: Draft) -> Row:
    nothing = [0.0] * len(one.ids)
    return Row(one.name, one.ids, one.mask, one.engine, nothing, one.weights, one.rollout, pictures=one.pictures)
