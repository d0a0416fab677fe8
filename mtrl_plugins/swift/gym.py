"""ms-swift's gym environments (`Env`), their registries, and the scheduler that runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import anyio

from gateway.errors import ConfigError
from mtrl_plugins.swift.multi_turn_scheduler import MultiTurnScheduler, call_user_function
from mtrl_plugins.swift.openenv import CLOSE_TIMEOUT_S, OpenEnvScheduler
from mtrl_plugins.swift.protocol import (
    ChatCompletionResponseChoice,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from mtrl_plugins.swift.tip_schedulers import MathTipsScheduler, ThinkingModelTipsScheduler


class Env(ABC):
    """The base class of gym environments."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Starts a rollout; returns the first user message, infos, and a system message or an empty one."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Answers the chat so far; returns the next user message, a reward, whether it is done, and infos."""

    @abstractmethod
    async def close(self) -> None: ...


class ContextManager(ABC):
    """Chooses the part of the history that the policy sees."""

    def __init__(self, ctx_config: dict[str, Any]) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages: ...


class _FullHistory(ContextManager):
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        return history


envs: dict[str, Any] = {}
context_managers: dict[str, Any] = {"dummyContextManager": _FullHistory}


@dataclass
class _Episode:
    """The environment of one rollout, with its rewards and infos so far."""

    env: Any
    context: Any
    rewards: list[float] = field(default_factory=list)
    infos: list[Any] = field(default_factory=list)
    observation: Any = None


class GYMScheduler(MultiTurnScheduler):
    """Runs a row's environment, which the `name` in its columns `env_config` and `ctx_config` chooses."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, *args, **kwargs)
        self.gym_env_name = kwargs.get("gym_env")
        self.context_manager_name = kwargs.get("context_manager")
        self._episodes: dict[str | None, _Episode] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        name = env_config.get("name") or self.gym_env_name
        return _find_registered(envs, name, "environment", "envs", "env_config.name")(env_config)

    def _create_context_manager(self, ctx_config: dict[str, Any]) -> Any:
        name = ctx_config.get("name") or self.context_manager_name or "dummyContextManager"
        return _find_registered(context_managers, name, "context manager", "context_managers", "ctx_config.name")(
            ctx_config
        )

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        try:
            return await super().run(infer_request, request_config, **kwargs)
        finally:
            episode = self._episodes.pop(infer_request.uuid, None)
            if episode is not None:
                with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                    await call_user_function(episode.env.close)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            row = request.data_dict
            env = await call_user_function(self._create_env, dict(row.get("env_config") or {}))
            episode = self._episodes[request.uuid] = _Episode(env, None)
            episode.context = await call_user_function(self._create_context_manager, dict(row.get("ctx_config") or {}))
            observation, info, system = await call_user_function(env.reset, request)
            episode.infos.append(info)
            system_messages = [{"role": "system", "content": system}] if system else []
            request.messages = [*system_messages, {"role": "user", "content": observation}]
            await self._apply_context_manager(episode, request)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        episode = self._episodes[infer_request.uuid]
        episode.observation, reward, done, info = await call_user_function(
            episode.env.step, deepcopy(infer_request.messages)
        )
        episode.rewards.append(float(reward))
        episode.infos.append(info)
        infos: dict[str, Any] = {"total_reward": sum(episode.rewards), "step_rewards": [*episode.rewards]}
        infos["gym_done"] = bool(done)
        infos |= {"trajectory_id": infer_request.uuid, "trajectory_info": [*episode.infos]}
        return {"done": bool(done), "rollout_infos": infos}

    async def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        episode = self._episodes[infer_request.uuid]
        infer_request.messages.append({"role": "user", "content": episode.observation})
        await self._apply_context_manager(episode, infer_request)
        return {"infer_request": infer_request}

    async def _apply_context_manager(self, episode: _Episode, request: RolloutInferRequest) -> None:
        request.messages = list(
            await call_user_function(episode.context.manage_context, request.messages, request.uuid)
        )


def _find_registered(known: dict[str, Any], name: Any, what: str, registry: str, field: str) -> Any:
    if name not in known:
        problem = f"unknown {what} {name!r}"
        remedy = f"write `{registry}[{name!r}] = ...` in a plug-in file; registered are {', '.join(known) or 'none'}"
        raise ConfigError(problem, field=field, remedy=remedy)
    return known[name]


multi_turns: dict[str, Any] = {
    "gym_scheduler": GYMScheduler,
    "math_tip_trick": MathTipsScheduler,
    "openenv_scheduler": OpenEnvScheduler,
    "thinking_tips_scheduler": ThinkingModelTipsScheduler,
}
