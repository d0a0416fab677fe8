"""An environment answers the policy: `reset` opens a rollout, `step` answers a turn and rewards it, `close` ends it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import anyio

from gateway.errors import ConfigError
from trainer.swift.protocol import (
    ChatCompletionResponseChoice,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from trainer.swift.scheduler import MultiTurnScheduler, called
from trainer.swift.tips import MathTipsScheduler, ThinkingModelTipsScheduler

CLOSE_S = 10.0
"""For an environment to close, whatever ended the rollout."""


class Env(ABC):
    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """What the policy is asked, what else is known, and a system message or an empty one."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """The answer to the chat so far, its reward, whether that was all, and what else is known."""

    @abstractmethod
    async def close(self) -> None: ...


class ContextManager(ABC):
    """What of the history the policy goes on seeing."""

    def __init__(self, ctx_config: dict[str, Any]) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages: ...


class _Whole(ContextManager):
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        return history


envs: dict[str, Any] = {}
context_managers: dict[str, Any] = {"dummyContextManager": _Whole}


@dataclass
class _Played:
    """One rollout's environment, and what came of it."""

    env: Any
    context: Any
    rewards: list[float] = field(default_factory=list)
    infos: list[Any] = field(default_factory=list)
    observation: Any = None


class GYMScheduler(MultiTurnScheduler):
    """Plays a row's environment: `env_config` and `ctx_config` are columns, whose `name` chooses."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, *args, **kwargs)
        self.gym_env_name = kwargs.get("gym_env")
        self.context_manager_name = kwargs.get("context_manager")
        self._played: dict[str | None, _Played] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        name = env_config.get("name") or self.gym_env_name
        return _named(envs, name, "environment", "envs", "env_config.name")(env_config)

    def _create_context_manager(self, ctx_config: dict[str, Any]) -> Any:
        name = ctx_config.get("name") or self.context_manager_name or "dummyContextManager"
        return _named(context_managers, name, "context manager", "context_managers", "ctx_config.name")(ctx_config)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        try:
            return await super().run(infer_request, request_config, **kwargs)
        finally:
            played = self._played.pop(infer_request.uuid, None)
            if played is not None:
                with anyio.move_on_after(CLOSE_S, shield=True):
                    await called(played.env.close)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            row = request.data_dict
            env = await called(self._create_env, dict(row.get("env_config") or {}))
            played = self._played[request.uuid] = _Played(env, None)
            played.context = await called(self._create_context_manager, dict(row.get("ctx_config") or {}))
            observation, info, system = await called(env.reset, request)
            played.infos.append(info)
            begun = [{"role": "system", "content": system}] if system else []
            request.messages = [*begun, {"role": "user", "content": observation}]
            await self._manage(played, request)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        played = self._played[infer_request.uuid]
        played.observation, reward, done, info = await called(played.env.step, deepcopy(infer_request.messages))
        played.rewards.append(float(reward))
        played.infos.append(info)
        told: dict[str, Any] = {"total_reward": sum(played.rewards), "step_rewards": [*played.rewards]}
        told["gym_done"] = bool(done)
        told |= {"trajectory_id": infer_request.uuid, "trajectory_info": [*played.infos]}
        return {"done": bool(done), "rollout_infos": told}

    async def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        played = self._played[infer_request.uuid]
        infer_request.messages.append({"role": "user", "content": played.observation})
        await self._manage(played, infer_request)
        return {"infer_request": infer_request}

    async def _manage(self, played: _Played, request: RolloutInferRequest) -> None:
        request.messages = list(await called(played.context.manage_context, request.messages, request.uuid))


def _named(known: dict[str, Any], name: Any, what: str, registry: str, field: str) -> Any:
    if name not in known:
        problem = f"there is no {what} {name!r}"
        remedy = f"write `{registry}[{name!r}] = ...` in a plug-in file; there are {', '.join(known) or 'none'}"
        raise ConfigError(problem, field=field, remedy=remedy)
    return known[name]


multi_turns: dict[str, Any] = {
    "gym_scheduler": GYMScheduler,
    "math_tip_trick": MathTipsScheduler,
    "thinking_tips_scheduler": ThinkingModelTipsScheduler,
}
