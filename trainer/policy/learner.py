"""A learner makes a step of a lesson: what each token is worth, how likely it is, and one sum to go down on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.learn.batch import Batch, Row, pack
from trainer.learn.lesson import Lesson
from trainer.learn.loss import loss
from trainer.learn.mismatch import Mismatch, measure
from trainer.learn.settings import AlgorithmSettings
from trainer.learn.worth import Worth, rows
from trainer.policy.before import distances, reread, values
from trainer.policy.critic import Critic
from trainer.policy.cut import micro, shares
from trainer.policy.errors import PolicyError
from trainer.policy.means import Means
from trainer.policy.memory import ran_out, remedy
from trainer.policy.policy import Policy
from trainer.policy.reader import Reads

EXACT = 1e-4
"""Nats. Where no token of a sample is further off, the engine's logprobs stand for the old policy's."""
NOTHING_FRESH = Mismatch(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Micro:
    """Rows that are in memory together, and of their tokens what the critic should have said."""

    batch: Batch
    returns_T: Tensor | None


class Learner:
    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSettings,
        *,
        exact: bool,
        reference: Reads | None = None,
        temperature: float = 1.0,
    ) -> None:
        """`exact` is what the engine says of its logprobs, `temperature` what it samples with."""
        if algorithm.credit.kind == "gae" and policy.critic is None:
            raise PolicyError("`algorithm.credit.kind: gae` needs a critic", "add `update.critic: {}`")
        if not temperature:
            raise PolicyError("what is sampled at temperature 0 cannot be learned from", "raise `sampling.temperature`")
        self._policy, self._algorithm, self._exact, self._temperature = policy, algorithm, exact, temperature
        self._reference = (reference or policy.reference()) if algorithm.kl.coefficient else None
        self._critic: Critic | None = policy.critic if algorithm.credit.kind == "gae" else None
        self._proximal = algorithm.ratio == "proximal"
        self._skipped = False
        self.notes: list[str] = []
        """For whoever runs this, until somebody tells them."""
        self.weighed: tuple[Row, ...] = ()
        """What the tokens of the latest lesson were worth, those included that taught nothing."""

    def learn(self, lesson: Lesson) -> dict[str, float]:
        """A lesson that teaches nothing moves nothing. Where a number is none, the error names its rollout."""
        try:
            return self._learn(lesson)
        except BaseException as error:
            self._policy.forget()
            if self._critic:
                self._critic.forget()
            if ran_out(error):
                known = remedy(self._policy.model, self._policy.settings)
                raise PolicyError(f"memory ran out in step {self._policy.steps + 1}", known) from error
            raise

    def _learn(self, lesson: Lesson) -> dict[str, float]:
        means = Means()
        worth = self._worth(lesson, means)
        self.weighed = worth.made
        if not worth.rows:
            return worth.metrics | means.told
        update = self._policy.settings
        steps = [self._micros(worth, span) for span in shares(len(worth.rows), update.minibatches)]
        single = update.epochs * len(steps) == 1
        sample = None
        if not single:
            steps, sample = self._aged(steps)
        for _ in range(update.epochs):
            for step in steps:
                self._step(step, worth, len(steps), single, means)
        told = worth.metrics | means.told
        told["mismatch/pass_skipped"] = float(single or sample is not None)
        if sample:
            told |= {"mismatch/mean": sample.mean, "mismatch/max": sample.most, "mismatch/kl": sample.kl}
        if self._critic:
            told["critic/loss"] = self._corrected(self._critic, [one for step in steps for one in step])
        return told

    def _worth(self, lesson: Lesson, means: Means) -> Worth:
        kl, far, expected = self._algorithm.kl, None, None
        if self._reference and kl.place == "reward":
            far = distances(lesson, self._policy, self._reference, kl.estimator, self._temperature)
            tokens = sum(weight > 0 for draft in lesson.drafts for weight in draft.weights)
            means.add({"kl/reference": sum(far) / max(1, tokens)}, 1)
        if self._critic:
            expected = values(lesson.drafts, self._policy, self._critic)
        return rows(lesson, self._algorithm, distances=far, values=expected)

    def _micros(self, worth: Worth, span: slice) -> list[Micro]:
        near, returns = worth.rows[span], worth.returns[span]
        made = []
        for part in micro([len(row.ids) for row in near], self._policy.settings.tokens):
            batch = pack(near[part]).to(self._policy.device)
            if self._reference and self._algorithm.kl.place == "loss":
                batch = replace(batch, ref_T=reread(batch, self._reference, self._temperature))
            flat = [value for row in returns[part] for value in row]
            made.append(Micro(batch, torch.tensor(flat, device=self._policy.device) if flat else None))
        return made

    def _aged(self, steps: list[list[Micro]]) -> tuple[list[list[Micro]], Mismatch | None]:
        """With the policy's logprobs before it moves, but for what earlier weights sampled. Where the engine's are the
        same on a sample, they are left in."""
        fresh = next((one for step in steps for one in step if bool(one.batch.fresh_T.any())), None)
        seen = measure(self._old(fresh).batch) if fresh else NOTHING_FRESH
        if self._exact and seen.within(EXACT) and not self._proximal:
            if not self._skipped:
                off = f"{seen.most:.1e} off at most"
                self.notes.append(f"the engine's logprobs are exact ({off}): no pass for the old policy's")
            self._skipped = True
            return steps, seen
        return [[self._old(one) for one in step] for step in steps], None

    def _old(self, one: Micro) -> Micro:
        """Where everything is stale, there is nothing to be read."""
        if not self._proximal and not bool(one.batch.fresh_T.any()):
            return one
        own_T = reread(one.batch, self._policy, self._temperature)
        return replace(one, batch=one.batch.aged(own_T, self._proximal))

    def _step(self, step: Sequence[Micro], worth: Worth, steps: int, single: bool, means: Means) -> None:
        """One of so many that the lesson is divided into. If it is the only one, what it finds is the old policy."""
        summed = 0.0
        for one in step:
            batch = one.batch
            asked = batch.ids_T, batch.sequence_T, batch.trained_T
            read = self._policy.read(*asked, self._temperature, batch.images)
            if single:
                batch = batch.aged(read.logprobs_T.detach(), self._proximal)
            made = loss(read.logprobs_T, batch, worth.totals, self._algorithm)
            value = made.value * steps
            value.backward()  # type: ignore[no-untyped-call]
            summed += value.item()
            means.add(made.metrics | {"entropy": float(read.entropy_T.sum()) / max(1, made.tokens)}, made.tokens)
        means.add({"loss": summed} | self._policy.step(), 1)

    def _corrected(self, critic: Critic, micros: Sequence[Micro]) -> float:
        """The critic learns what came of it."""
        tokens = sum(int(one.batch.mask_T.sum()) for one in micros)
        loss = sum(critic.gather(one.batch, one.returns_T, tokens) for one in micros if one.returns_T is not None)
        critic.step()
        return loss
