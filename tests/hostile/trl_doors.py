"""Doors of `GRPO` and other classes for users of TRL, which `doors.py` lists."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from anyio import to_thread

from gateway.native.function import FunctionTool
from mtrl_plugins.trl.caller_thread import CallerThread
from mtrl_plugins.trl.function_tools import CallerTools
from mtrl_plugins.trl.reward_functions import Progress, RewardFunctions
from tests.hostile.gateway_doors import PATIENCE, Act, call_tools, settle
from tests.trainer.reward.attempts import TASK, CharacterDecoder, answer_group, reward_settings
from trainer.reward.scorer import Scorer


async def with_caller(main: Callable[[CallerThread], Awaitable[str]]) -> str:
    """Runs with a caller's thread of its own, as TRL's trainer does."""
    caller = CallerThread()
    told: str = await to_thread.run_sync(caller.run, partial(main, caller), abandon_on_cancel=True)
    return told


async def call_trl_tool(act: Act, *, in_threads: bool = False) -> str:
    def tool() -> Any:
        """Acts."""
        return act()

    return await _call_wrapped(tool, in_threads)


async def call_async_trl_tool(act: Act) -> str:
    async def tool() -> Any:
        """Acts."""
        return await settle(act())

    return await _call_wrapped(tool, in_threads=False)


async def _call_wrapped(tool: Callable[..., Any], in_threads: bool) -> str:
    async def main(caller: CallerThread) -> str:
        tools = CallerTools(caller, PATIENCE.s, in_threads=in_threads)
        return await call_tools([FunctionTool(tools.wrap(tool))], "tool")

    return await with_caller(main)


async def call_trl_reward(act: Act) -> str:
    def reward(completions: Any, **kwargs: Any) -> Any:
        value = act()
        return [1.0] if value == "fine" else value

    return await _score(reward)


async def call_async_trl_reward(act: Act) -> str:
    async def reward(completions: Any, **kwargs: Any) -> Any:
        value = await settle(act())
        return [1.0] if value == "fine" else value

    return await _score(reward)


async def _score(reward: Callable[..., Any]) -> str:
    async def main(caller: CallerThread) -> str:
        functions = RewardFunctions({"mine": reward}, caller, (), PATIENCE.s, Progress(1, 1, 1.0, 1.0))
        component = {"function": "reward_funcs.mine", "batched": True, "timeout_s": 10 * PATIENCE.s}
        scorer = Scorer(reward_settings(mine=component), None, CharacterDecoder(), functions.as_given())  # type: ignore[arg-type]
        group = await scorer.score(TASK, answer_group("a"))
        return "ok" if group.scored else group.failed[0].reason

    return await with_caller(main)
