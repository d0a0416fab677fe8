"""Warm start: trains a demo's model on demonstrations, first to solve tasks, then to guess most of the time.

The second phase hides the skill. Reinforcement learning can bring it back, since only behaviour that occurs sometimes
can be rewarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from gateway.chat_messages import chat_content
from gateway.feedback.gsm8k import WRONG_REPLY
from mtrl_plugins.demo.facts.facts_tasks import KINDS
from mtrl_plugins.demo.problem import ExpectedCall, Problem, answer_message
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Template
from trainer.template.chat_template import Tool, build_call
from trainer.template.render_reply import render_reply

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

    skill_steps: int = 1000
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


@dataclass(frozen=True, slots=True)
class PaddedLedgers:
    """Ledgers as a tensor, padded on the right, which a causal model does not see."""

    ids: Tensor
    mask: Tensor
    """True where the policy wrote the id."""

    @classmethod
    def from_ledgers(cls, ledgers: Sequence[Ledger]) -> PaddedLedgers:
        ids = [torch.tensor(ledger.ids) for ledger in ledgers]
        mask = [torch.tensor(ledger.mask) for ledger in ledgers]
        return cls(*(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (ids, mask)))


@dataclass(frozen=True)
class WarmStartSetup:
    """The demonstrations of a demo, and the loss on them."""

    writer: DemonstrationWriter
    problems: Callable[[str, tuple[str, ...]], Iterator[Problem]]
    """Generates problems without end, from a seed and the kinds."""
    loss: Callable[[PreTrainedModel, Sequence[Ledger]], Tensor]


@dataclass(frozen=True, slots=True)
class _Phase:
    """A phase of a recipe. It has its own random state and optimizers, so that phases may also be run separately."""

    name: str
    steps: int
    call_probability: float
    optimizers: Sequence[Optimizer]
    learning_rate_factor: Callable[[int], float]

    def demonstrations(self, setup: WarmStartSetup, recipe: Recipe) -> Iterator[list[Ledger]]:
        draw = Random(f"{self.name}/{recipe.seed}")  # noqa: S311 - not security-relevant
        problems = setup.problems(f"{self.name}/{recipe.seed}", recipe.kinds)
        for _ in range(self.steps):
            yield [setup.writer.write(next(problems), draw, self.call_probability) for _ in range(recipe.batch_size)]


def warm_start(
    model: PreTrainedModel, setup: WarmStartSetup, recipe: Recipe, report: Progress = lambda *_: None
) -> None:
    """Trains the model in place; `report` is called after each step."""
    model.train()
    step, steps = 0, recipe.skill_steps + recipe.habit_steps
    phases = (_skill_phase(model, recipe), _habit_phase(model, recipe))
    for phase in filter(lambda phase: phase.steps, phases):
        schedules = [LambdaLR(optimizer, phase.learning_rate_factor) for optimizer in phase.optimizers]
        for ledgers in phase.demonstrations(setup, recipe):
            loss = setup.loss(model, ledgers)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(phase.optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            step += 1
            report(step, steps, loss.item())
    model.train(False)


def _skill_phase(model: PreTrainedModel, recipe: Recipe) -> _Phase:
    """Muon for the matrices within the layers, AdamW for everything else."""
    in_layers = {
        name for name, weight in model.named_parameters() if weight.ndim == 2 and LAYER_CONTAINERS & {*name.split(".")}
    }
    matrices = [weight for name, weight in model.named_parameters() if name in in_layers]
    others = [weight for name, weight in model.named_parameters() if name not in in_layers]
    muon = torch.optim.Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.0)

    def learning_rate_factor(step: int) -> float:
        decay = (recipe.skill_steps - step) / (recipe.skill_steps * (1 - recipe.decay_start))
        return min(1.0, (step + 1) / recipe.warmup_steps, decay)

    return _Phase("skill", recipe.skill_steps, 1.0, (muon, _adamw(others, recipe.adamw_lr)), learning_rate_factor)


def _habit_phase(model: PreTrainedModel, recipe: Recipe) -> _Phase:
    """AdamW only, with a learning rate like that of the job that unlearns the habit."""
    optimizer = _adamw(model.parameters(), recipe.habit_lr)
    steps = recipe.habit_steps
    return _Phase("habit", steps, recipe.call_probability, (optimizer,), lambda step: 1 - step / steps)


def _adamw(weights: Iterable[Parameter], lr: float) -> Optimizer:
    return torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)


def compute_text_loss(model: PreTrainedModel, ledgers: Sequence[Ledger]) -> Tensor:
    """The mean cross-entropy of the policy's tokens."""
    padded = PaddedLedgers.from_ledgers(ledgers)
    logits = model(input_ids=padded.ids).logits[:, :-1][padded.mask[:, 1:]]
    return cross_entropy(logits, padded.ids[:, 1:][padded.mask[:, 1:]])
