"""A policy that calls a tool again and again, in a chat that its context does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import anyio
import torch

from gateway.types import Task as SessionTask
from gateway.types import Text, ToolResult
from mtrl_plugins.history.compaction import Compaction
from mtrl_plugins.history.delegate import DelegatePlayer
from mtrl_plugins.history.delegate_settings import DelegateSettings
from mtrl_plugins.history.settings import HistorySettings
from tests.trainer.algorithms.scored_groups import group
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, make_gateway, render_calls
from trainer.algorithms.advantages import compute_token_advantages
from trainer.algorithms.loss import aggregate_loss
from trainer.algorithms.packing import pack
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns
from trainer.algorithms.train_batch import build_train_batch
from trainer.engine.base import EngineError, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author, Ledger
from trainer.reward.scorer import ScoredRollout
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import Stepper, ToolsAndFeedback
from trainer.rollout.task import Task

TEMPLATE = make_template(HERMES)
TASK = Task("t", ({"role": "system", "content": "You read."}, {"role": "user", "content": "Read all pages."}))
REQUEST = "SUMMARISE NOW"


async def read(page: int, words: int) -> ToolResult:
    """Reads a page."""
    return ToolResult((Text(f"page {page}: " + "word " * words),), reward=float(page))


def read_pages(words: Sequence[int], summary: str = "I read some pages.", last: str = "All read.") -> Any:
    """The turns of a policy that reads pages of so many words, and summarises when it is asked to."""
    turns = iter([render_calls(("read", {"page": page, "words": count})) for page, count in enumerate(words)])

    def write(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        asked = TEMPLATE.tokenizer.decode(ids).rpartition("<|im_start|>user")[2]
        text = summary if REQUEST in asked and "assistant" in asked[-30:] else next(turns, last)
        return encode_turns(TEMPLATE, text)[0]

    return write


async def play(
    policy: Any, *, stepper: Stepper | None = None, context_length: int | None = None, **settings: Any
) -> tuple[Rollout, ScriptedEngine]:
    """One rollout whose history is shortened; the settings are those of `history` and of `limits`."""
    of_history = {name: settings.pop(name) for name in ("kind", "at", "times") if name in settings}
    history = HistorySettings(request=REQUEST, **of_history)
    defaults = {"assistant_turns": 60, "tool_calls": 60, "user_turns": 60, "rollout_tokens": 1200, "turn_tokens": 60}
    limits = RolloutLimits.model_validate(defaults | settings)
    with anyio.fail_after(60):
        async with (
            make_gateway(read) as gateway,
            ScriptedEngine(policy, context_length=context_length or 2**20) as engine,
        ):
            wrapped = Compaction(history, stepper or ToolsAndFeedback())
            runner = RolloutRunner(engine, TEMPLATE, gateway, limits, stepper=wrapped)  # type: ignore[arg-type]
            return await runner.run(TASK, group="g"), engine


def texts(rollout: Rollout, ledger: int) -> list[tuple[str, str]]:
    """Each entry of a ledger with its author."""
    return [(entry.author.value, TEMPLATE.tokenizer.decode(entry.ids)) for entry in rollout.ledgers[ledger]]


def sampled_turns(rollout: Rollout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The policy's turns, each with the ids before it."""
    return [
        (ledger.ids[:start], entry.ids)
        for ledger in rollout.ledgers
        for start, entry in zip(ledger.starts, ledger, strict=True)
        if entry.author is Author.POLICY
    ]


def join_ledgers(rollout: Rollout) -> Rollout:
    """The rollout as if it were in one ledger."""
    return replace(rollout, ledger=Ledger(tuple(chain.from_iterable(rollout.ledgers))), earlier=())


def gradient_factors(rollouts: Sequence[Rollout], aggregate: str | int) -> list[float]:
    """By what the loss of each trained token of a group is multiplied; the first rollout is right, others are not."""
    settings = AlgorithmSettings.model_validate({"name": "grpo", "aggregate": aggregate})
    scored = [
        ScoredRollout(
            replace(rollout, index=index),
            {"right": float(not index)},
            float(not index),
            (0.0,) * len(rollout.turns),
            True,
        )
        for index, rollout in enumerate(rollouts)
    ]
    result = compute_token_advantages(build_train_batch([group(*scored)], settings, weigh_all_turns), settings)
    packed = pack(result.all_rows)
    losses_T = torch.zeros(len(packed.ids_T), requires_grad=True)
    aggregate_loss(losses_T, packed, aggregate, result.totals).backward()
    assert losses_T.grad is not None
    factors: list[float] = losses_T.grad[losses_T.grad != 0].tolist()
    return factors


FAMILY_TASK = Task("t", ({"role": "user", "content": "Find it out."},))
Turns = Sequence[str | EngineError]


def delegate(*tasks: str) -> str:
    """A turn that gives tasks to sub-agents."""
    return render_calls(*(("delegate", {"task": task}) for task in tasks))


def write_turns(parent: Turns, children: Mapping[int, Turns]) -> Callable[[Sequence[int], Sampling, str], Answer]:
    """The turns of a rollout and of its sub-agents by their number; `done` follows the last."""
    counts: Counter[str] = Counter()

    def write(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        number = int(key.partition("sub-agent-")[2].partition("/")[0] or 0)
        turns = children.get(number, ()) if number else parent
        counts[key] += 1
        turn = turns[counts[key] - 1] if counts[key] <= len(turns) else f"done {number}"
        return turn if isinstance(turn, EngineError) else encode_turns(TEMPLATE, turn)[0]

    return write


async def play_family(
    parent: Turns,
    children: Mapping[int, Turns],
    *functions: Callable[..., Any],
    engine: ScriptedEngine | None = None,
    stepper: Stepper | None = None,
    in_order: bool = False,
    limits: Mapping[str, Any] | None = None,
    named: tuple[str, ...] | None = None,
    **settings: Any,
) -> tuple[Rollout, ScriptedEngine]:
    """One rollout, whose row may have named its tools; the settings are those of `delegate`."""
    stepper = stepper or ToolsAndFeedback()
    player = DelegatePlayer(DelegateSettings(**settings), stepper, in_order=in_order)
    defaults = {"assistant_turns": 20, "tool_calls": 60, "rollout_tokens": 4000, "turn_tokens": 200}
    with anyio.fail_after(60):
        async with (
            make_gateway(*(functions or (read,))) as gateway,
            engine or ScriptedEngine(write_turns(parent, children)) as opened,
        ):
            chosen = RolloutLimits.model_validate(defaults | {**(limits or {})})
            runner = player.wrap(RolloutRunner(opened, TEMPLATE, gateway, chosen, stepper=stepper))
            return await runner.run(replace(FAMILY_TASK, session_task=SessionTask(tools=named)), group="g"), opened
