"""Warm start: SFT of a demo's model on demonstrations, first of solved tasks, then of answers mostly guessed.

The second phase hides the skill. Reinforcement learning can bring it back, since only behaviour that occurs sometimes
can be rewarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from gateway.chat_messages import chat_content
from gateway.feedback.gsm8k import WRONG_REPLY
from mtrl_plugins.demo.facts.facts_tasks import KINDS
from mtrl_plugins.demo.problem import ExpectedCall, Problem, answer_message
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns
from trainer.algorithms.train_batch import TrainBatch, build_train_batch
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.policy.optimizers import LR_RATIO, OptimizerMaker, build_optimizer
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.task import Task
from trainer.template import Template
from trainer.template.chat_template import Tool, build_call
from trainer.template.render_reply import render_reply
from trainer.train.trace_source import score_trace

_DUMMY_QUESTION: Message = {"role": "user", "content": "?"}


@dataclass(frozen=True, eq=False)
class DemonstrationWriter:
    """Writes demonstrations as ledgers, with the ids of a template."""

    template: Template
    tools: Sequence[Tool]

    def write(self, problem: Problem, draw: Random, call_probability: float = 1.0) -> Ledger:
        """Writes a demonstration. Each call is made with the given probability; otherwise the answer is guessed.

        If the task allows a second try, half of the demonstrations begin after a wrong first one. That first answer
        counts as the task's text, so it is not trained on.
        """
        messages = problem.task.messages
        if problem.task.has_feedback and draw.random() < 0.5:
            messages = (*messages, answer_message(problem.guess(draw)), {"role": "user", "content": WRONG_REPLY})
        ledger = Ledger((Entry(Author.TASK, self.template.encode_prompt(messages, self.tools), messages),))
        for index, turn in enumerate(problem.turns):
            if index < len(problem.calls) and draw.random() >= call_probability:
                return ledger + self._policy_entry(answer_message(problem.guess(draw)))
            ledger += self._policy_entry(turn)
            if index < len(problem.calls):
                ledger += self._tool_entry(problem.calls[index], f"call_{index + 1}")
        return ledger

    def encode_turn(self, turn: Message) -> tuple[int, ...]:
        """The ids of a turn, as the policy would write it."""
        return render_reply(self.template, (_DUMMY_QUESTION,), turn, self.tools)

    def _policy_entry(self, turn: Message) -> Entry:
        ids = self.encode_turn(turn)
        return Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), finish_reason="stop")

    def _tool_entry(self, call: ExpectedCall, id: str) -> Entry:
        content: Any = call.result if isinstance(call.result, str) else chat_content([call.result])
        layout = self.template.prepare_media([{"role": "tool", "tool_call_id": id, "content": content}])
        calls = [build_call(id, call.tool, "{}")]
        ids = self.template.encode_tail(layout.messages, ended=True, calls=calls)
        return self.template.attach_media(layout, Entry(Author.TOOL, ids, source=call.tool))


Progress = Callable[[int, int, float], None]
"""Called with the step, the number of steps, and the loss."""
LAYER_CONTAINERS = {"layers", "blocks"}
"""Names of the modules that hold the layers of a language model, and of a vision encoder."""
WARM_START_KINDS = (*KINDS, "sum")
"""Sums come twice: they are learned last, because their numbers are copied from the question and not from a result."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps and learning rates of a warm start."""

    skill_steps: int = 1300
    """Steps on perfect demonstrations."""
    habit_steps: int = 150
    """Steps on demonstrations that mostly guess."""
    call_probability: float = 0.25
    """How often a call is made, rather than the answer guessed, in the habit's demonstrations."""
    kinds: tuple[str, ...] = WARM_START_KINDS
    """Kinds of tasks, shown in turn."""
    batch_size: int = 16
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup_steps: int = 15
    decay_start: float = 0.6
    """The share of the skill's steps after which the learning rate falls."""
    habit_lr: float = 1e-3
    """The learning rate of the habit's steps."""
    demo: str = "demo"
    """The name of the demo."""
    seed: int = 0


PLAIN_RECIPE = Recipe(skill_steps=300, habit_steps=0, kinds=("fact", "sum", "hop"))
"""No habit, and at most two lookups; it stops while the model still tries other ways than those shown."""


SFT = AlgorithmSettings(name="sft")
_NO_TASK = Task("", ())


@dataclass(frozen=True)
class WarmStartSetup:
    """The demonstrations of a demo."""

    writer: DemonstrationWriter
    problems: Callable[[str, tuple[str, ...]], Iterator[Problem]]
    """Generates problems without end, from a seed and the kinds."""

    def write_batches(self, phase: str, recipe: Recipe, call_probability: float) -> Iterator[TrainBatch]:
        """Batches without end. Each phase has its own random state, so that phases may also be run separately."""
        draw = Random(f"{phase}/{recipe.seed}")  # noqa: S311 - not security-relevant
        problems = self.problems(f"{phase}/{recipe.seed}", recipe.kinds)
        while True:
            yield build_batch(
                [self.writer.write(next(problems), draw, call_probability) for _ in range(recipe.batch_size)]
            )


def build_batch(ledgers: Iterable[Ledger]) -> TrainBatch:
    """A batch of SFT, of what the policy wrote in these ledgers."""
    rollouts = [Rollout(_NO_TASK.id, ledger, StopReason.DONE) for ledger in ledgers]
    return build_train_batch([score_trace(_NO_TASK, rollout) for rollout in rollouts], SFT, weigh_all_turns)


@dataclass(frozen=True, slots=True)
class _Phase:
    """A phase of a recipe, with an optimizer of its own."""

    name: str
    steps: int
    call_probability: float
    settings: UpdateSettings
    make_optimizer: OptimizerMaker
    decay_start: int
    """The step from which the learning rate falls to 0."""


def warm_start(
    model: PreTrainedModel, setup: WarmStartSetup, recipe: Recipe, report: Progress = lambda *_: None
) -> None:
    """Trains the model in place; `report` is called after each step.

    The skill is learned with Muon; the habit with AdamW, and a learning rate like that of the job that unlearns it.
    """
    decay_start = max(recipe.warmup_steps, round(recipe.decay_start * recipe.skill_steps))
    update = UpdateSettings(lr=recipe.adamw_lr, warmup_steps=recipe.warmup_steps, dtype="float32")
    muon = partial(MuonWithAdamW, muon_lr=recipe.muon_lr)
    skill = _Phase("skill", recipe.skill_steps, 1.0, update, muon, decay_start)
    update = UpdateSettings(lr=recipe.habit_lr, dtype="float32")
    habit = _Phase("habit", recipe.habit_steps, recipe.call_probability, update, build_optimizer, 0)
    step, image_processor = 0, setup.writer.template.image_processor
    for phase in filter(lambda phase: phase.steps, (skill, habit)):
        policy = Policy(model, phase.settings, None, image_processor, phase.make_optimizer)
        updater = PolicyUpdater(policy, SFT, exact=True, deterministic=True)
        for batch in islice(setup.write_batches(phase.name, recipe, phase.call_probability), phase.steps):
            if policy.steps == phase.decay_start:  # A rate falls after its warm-up, which this step is made the end of.
                falling = {"lr_scheduler": "linear", "decay_steps": phase.steps, "min_lr_ratio": 0.0}
                policy.settings = policy.settings.model_copy(update=falling | {"warmup_steps": phase.decay_start})
            metrics = updater.train_step(batch)
            step += 1
            report(step, recipe.skill_steps + recipe.habit_steps, metrics["loss"])


class MuonWithAdamW(Optimizer):
    """Muon for the matrices within the layers, AdamW for everything else, each with a learning rate of its own.

    Its state is not among what checkpoints save: a warm start is not resumed.
    """

    def __init__(self, weights: Mapping[str, Tensor], settings: UpdateSettings, muon_lr: float) -> None:
        matrices = {
            name: weight
            for name, weight in weights.items()
            if weight.ndim == 2 and weight.requires_grad and LAYER_CONTAINERS & {*name.split(".")}
        }
        muon = Muon(matrices.values(), muon_lr, muon_lr / settings.rate)
        others = {name: weight for name, weight in weights.items() if name not in matrices}
        self._parts = (muon, build_optimizer(others, settings))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


class Muon(Optimizer):
    """The steps of `torch.optim.Muon`, in float32 and with one product for all matrices of a shape.

    torch's multiplies one matrix after another, in bfloat16: a CPU without AVX-512 takes 68 ms a step for the demo's
    model, where all else of a step takes 105; these take 5.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, lr_ratio: float, momentum: float = 0.95) -> None:
        super().__init__([{"params": [*matrices], LR_RATIO: lr_ratio}], {"lr": lr})
        self.momentum = momentum
        self._by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in self.param_groups[0]["params"]:
            self._by_shape.setdefault(matrix.shape, []).append(matrix)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for (rows, columns), matrices in self._by_shape.items():
            gradients: list[Any] = [matrix.grad for matrix in matrices]  # `Policy.step` fills all.
            gradients_NAB = torch.stack(gradients)
            state = self.state[matrices[0]]
            average_NAB = state.setdefault("average", torch.zeros_like(gradients_NAB))
            average_NAB.lerp_(gradients_NAB, 1 - self.momentum)
            change_NAB = orthogonalise(gradients_NAB.lerp(average_NAB, self.momentum))
            rate = self.param_groups[0]["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(matrices, [*change_NAB], alpha=-rate)


def orthogonalise(matrices_NAB: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values near 1, by five steps of Newton and Schulz."""
    is_tall = matrices_NAB.size(1) > matrices_NAB.size(2)
    x_NAB: Tensor = matrices_NAB.mT if is_tall else matrices_NAB
    x_NAB = x_NAB / x_NAB.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram_NAA = x_NAB @ x_NAB.mT
        x_NAB = 3.4445 * x_NAB + (2.0315 * gram_NAA @ gram_NAA - 4.775 * gram_NAA) @ x_NAB
    return x_NAB.mT if is_tall else x_NAB
