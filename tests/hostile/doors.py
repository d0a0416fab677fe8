"""Every place where user code is called (`Door`), opened in the smallest way in which a run or a gateway opens it.

A door calls a function and returns what it tells about it: `ok`, or the text that an operator or the policy reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from mtrl_plugins.agents.agent_host import AgentHost
from mtrl_plugins.agents.agent_runner import AgentRunner
from mtrl_plugins.agents.settings import AgentSettings
from mtrl_plugins.swift.protocol import RolloutInferRequest
from mtrl_plugins.swift.schedulers import Env, GYMScheduler, MultiTurnScheduler, envs
from mtrl_plugins.swift.stepper import wrap_scheduler
from tests.hostile.gateway_doors import (
    PATIENCE,
    Act,
    call_async_tool,
    call_class_environment,
    call_class_tool,
    call_function_tool,
    parse_result,
    settle,
    take_feedback,
)
from tests.hostile.trl_doors import call_async_trl_reward, call_async_trl_tool, call_trl_reward, call_trl_tool
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, make_gateway, make_tasks, script_by_task
from tests.trainer.reward.attempts import TASK, CharacterDecoder, answer_group, reward_settings
from trainer.algorithms.token_weights import TokenWeightError, compute_token_weights
from trainer.engine.scripted import ScriptedEngine
from trainer.reward.scorer import GivenRewards, Scorer
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, ToolsAndFeedback, Turn


async def score_reward(is_async: bool, batched: bool, act: Act) -> str:
    def reward(attempt: Any) -> Any:
        value = act()
        return value if value != "fine" else [1.0] if batched else 1.0

    async def async_reward(attempt: Any) -> Any:
        return await settle(reward(attempt))

    settings = reward_settings(mine={"function": "given", "batched": batched, "timeout_s": PATIENCE.s})
    given = GivenRewards({"given": async_reward if is_async else reward})
    scorer = Scorer(settings, None, CharacterDecoder(), given)  # type: ignore[arg-type]
    group = await scorer.score(TASK, answer_group("a"))
    return "ok" if group.scored else group.failed[0].reason


@dataclass
class ActingStepper:
    """A stepper of a user, of which one method acts."""

    method: str
    act: Act

    def check_finished(self, turn: Turn) -> Any:
        value = self.act() if self.method == "check_finished" else False
        return False if value == "fine" else value

    def step(self, turn: Turn) -> Any:
        value = self.act() if self.method == "step" else "fine"
        return Step(stop=StopReason.STEP_DONE) if value == "fine" else value


class ActingFactory(ToolsAndFeedback):
    """A stepper that begins and finishes each rollout, of which one method acts."""

    def __init__(self, method: str, act: Act) -> None:
        self.method, self.act = method, act

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[Any]:
        if self.method == "begin":
            await settle(self.act())
        yield Step(history=start.task.messages), self

    async def finish(self, turn: Turn | None, stop: StopReason) -> Any:
        value = await settle(self.act()) if self.method == "finish" else "fine"
        return RolloutEnd() if value == "fine" else value


async def roll_out(stepper: Any) -> str:
    limits = RolloutLimits(timeout_s=2 * PATIENCE.s, rollout_tokens=100_000)
    (task,) = make_tasks("t")
    async with make_gateway() as gateway, ScriptedEngine(script_by_task({"*": ("one", "two")})) as engine:
        rollout = await RolloutRunner(engine, make_template(HERMES), gateway, limits, stepper=stepper).run(task)
    is_ok = rollout.stop in (StopReason.DONE, StopReason.STEP_DONE)
    return "ok" if is_ok else f"{rollout.stop}: {rollout.reason}"


async def run_scheduler(method: str, act: Act) -> str:
    class Scheduler(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            value = act() if method == "step" else "fine"
            infer_request.messages.append({"role": "user", "content": "Again."})
            return infer_request if value == "fine" else value

        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            value = act() if method == "check_finished" else "fine"
            return current_turn > 1 if value == "fine" else value

        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            output = await super().run(infer_request, request_config, **kwargs)
            value = await settle(act()) if method == "run" else "fine"
            return output if value == "fine" else value

    return await roll_out(wrap_scheduler(Scheduler))


async def step_environment(method: str, act: Act) -> str:
    class World(Env):
        async def reset(self, config: RolloutInferRequest) -> Any:
            value = await settle(act()) if method == "reset" else "fine"
            return ("Go.", {}, "") if value == "fine" else value

        async def step(self, action: Any) -> Any:
            value = await settle(act()) if method == "step" else "fine"
            return ("Done.", 1.0, True, {}) if value == "fine" else value

        async def close(self) -> None:
            if method == "close":
                await settle(act())

    name = f"hostile {id(World)}"
    envs[name] = World
    try:
        return await roll_out(wrap_scheduler(GYMScheduler, gym_env=name))
    finally:
        del envs[name]


async def weigh_tokens(act: Act) -> str:
    (rollout,) = answer_group("a")

    def weigh(ledger: Any) -> Any:
        value = act()
        return [float(bit) for bit in ledger.mask] if value == "fine" else value

    try:
        compute_token_weights(rollout.ledger, weigh, "r")
    except TokenWeightError as error:
        return str(error)
    return "ok"


async def play_agent(is_async: bool, act: Act) -> str:
    def finish(value: Any) -> Any:
        return 1.0 if value == "fine" else value

    def agent(base_url: str, task: Any, session: Any) -> Any:
        return finish(act())

    async def async_agent(base_url: str, task: Any, session: Any) -> Any:
        return finish(await settle(act()))

    limits = RolloutLimits(timeout_s=2 * PATIENCE.s)
    # Its endpoint is not served: that needs asyncio.
    host = AgentHost(AgentSettings(function="tests.hostile.doors:play_agent"))
    host.endpoint.url, host.function = "http://127.0.0.1:9", async_agent if is_async else agent
    (task,) = make_tasks("t")
    async with make_gateway() as gateway, ScriptedEngine(script_by_task({"*": ()})) as engine:
        rollout = await AgentRunner(engine, make_template(HERMES), gateway, limits, host=host).run(task)
    asked_nothing = "without asking the policy" in rollout.reason
    return "ok" if asked_nothing else f"{rollout.stop}: {rollout.reason}"


@dataclass(frozen=True)
class Door:
    """A place where user code is called."""

    open: Callable[[Act], Awaitable[str]]
    ignores_value: bool = False
    """What the code returns does not matter."""
    is_silent: bool = False
    """Its failure is only logged, since the rollout is over."""
    has_deadline: bool = True
    """Code that never returns is given up: it runs in a thread, or in a process of its own."""
    is_async: bool = False
    """The code is async: it is given up where it waits."""
    is_generator: bool = False
    """Nobody can close the code where it ignores its cancellation."""


DOORS: Mapping[str, Door] = {
    "tool: function": Door(call_function_tool),
    "tool: async function": Door(call_async_tool, has_deadline=False, is_async=True),
    "tool: create": Door(partial(call_class_tool, "create"), ignores_value=True, has_deadline=False, is_async=True),
    "tool: execute": Door(partial(call_class_tool, "execute"), has_deadline=False, is_async=True),
    "tool: calc_reward": Door(partial(call_class_tool, "calc_reward"), True, True, False, True),
    "tool: release": Door(partial(call_class_tool, "release"), True, True, False, True),
    "class environment: reset": Door(partial(call_class_environment, "reset"), True, has_deadline=False),
    "class environment: method": Door(partial(call_class_environment, "look")),
    "class environment: async method": Door(
        partial(call_class_environment, "listen"), has_deadline=False, is_async=True
    ),
    "class environment: get_reward": Door(partial(call_class_environment, "get_reward"), True, True, False),
    "interaction: start": Door(partial(take_feedback, "start"), ignores_value=True, has_deadline=False, is_async=True),
    "interaction: turn": Door(partial(take_feedback, "turn"), has_deadline=False, is_async=True),
    "interaction: finalize": Door(partial(take_feedback, "finalize"), True, True, False, True),
    "parse hook": Door(parse_result),
    "reward": Door(partial(score_reward, False, False)),
    "reward: batched": Door(partial(score_reward, False, True)),
    "reward: async": Door(partial(score_reward, True, False), is_async=True),
    "stepper: check_finished": Door(lambda act: roll_out(ActingStepper("check_finished", act))),
    "stepper: step": Door(lambda act: roll_out(ActingStepper("step", act))),
    "stepper: begin": Door(lambda act: roll_out(ActingFactory("begin", act)), True, False, False, True, True),
    "stepper: finish": Door(lambda act: roll_out(ActingFactory("finish", act)), has_deadline=False, is_async=True),
    "scheduler: step": Door(partial(run_scheduler, "step")),
    "scheduler: check_finished": Door(partial(run_scheduler, "check_finished")),
    "scheduler: run": Door(partial(run_scheduler, "run"), has_deadline=False, is_async=True),
    "environment: reset": Door(partial(step_environment, "reset"), has_deadline=False, is_async=True),
    "environment: step": Door(partial(step_environment, "step"), has_deadline=False, is_async=True),
    "environment: close": Door(partial(step_environment, "close"), True, False, False, True),
    "TRL: tool": Door(call_trl_tool, has_deadline=False),
    "TRL: tool in a thread": Door(partial(call_trl_tool, in_threads=True)),
    "TRL: async tool": Door(call_async_trl_tool, has_deadline=False, is_async=True),
    "TRL: reward": Door(call_trl_reward, has_deadline=False),
    "TRL: async reward": Door(call_async_trl_reward, has_deadline=False, is_async=True),
    "agent: function": Door(partial(play_agent, False)),
    "agent: async function": Door(partial(play_agent, True), has_deadline=False, is_async=True),
    "token weights": Door(weigh_tokens, has_deadline=False),
}


async def open_door(name: str, act: Act) -> str:
    """What a door tells about a function."""
    with anyio.fail_after(300):
        return await DOORS[name].open(act)
