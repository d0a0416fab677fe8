"""A policy with sub-agents, each of which writes the turns that a test gives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from gateway.types import Task as SessionTask
from mtrl_plugins.history.delegate import DelegatePlayer
from mtrl_plugins.history.delegate_settings import DelegateSettings
from tests.plugins.history.long_chats import TEMPLATE, read
from tests.trainer.policy_scripts import encode_turns, make_gateway, render_calls
from trainer.engine.base import EngineError, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import Stepper, ToolsAndFeedback
from trainer.rollout.task import Task

TASK = Task("t", ({"role": "user", "content": "Find it out."},))
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
            return await runner.run(replace(TASK, session_task=SessionTask(tools=named)), group="g"), opened
