"""ms-swift's scheduler for OpenEnv environments, which run on a server and take actions as mappings."""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any

import anyio

from gateway.errors import ConfigError
from mtrl_plugins.swift.multi_turn_scheduler import MultiTurnScheduler, call_user_function
from mtrl_plugins.swift.protocol import (
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)

CLOSE_TIMEOUT_S = 10.0
"""The time that an environment has to close."""
MAX_TRIES = 3
"""How often a call to the environment's server is tried, with a new connection each time."""
RETRY_S = 2.0
"""The pause before the second try; later ones are longer."""


class OpenEnvWrapper:
    """A connection to the environment at `base_url`; its methods block."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = env_config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """Starts an episode; returns the observation and metadata."""
        result = self._call("reset", **self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """Takes an action; returns the observation, the reward, whether the episode is done, and metadata."""
        result = self._call("step", action)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """Closes the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        for attempt in range(1, MAX_TRIES + 1):
            try:
                return getattr(self._connect(), name)(*args, **kwargs)
            except ConfigError:
                raise
            except Exception:  # boundary: the client raises errors of whatever transport it uses
                self._client = None
                if attempt == MAX_TRIES:
                    raise
                time.sleep(RETRY_S * attempt)
        raise AssertionError

    def _connect(self) -> Any:
        if self._client is None:
            try:
                library = import_module("openenv.core.generic_client")
            except ImportError as error:
                remedy = "run `pip install openenv`, or override `_create_env`"
                raise ConfigError("OpenEnvScheduler needs openenv, which is not installed", remedy=remedy) from error
            self._client = library.GenericEnvClient(base_url=self.base_url).sync()
            self._client.__enter__()
        return self._client


class OpenEnvScheduler(MultiTurnScheduler):
    """Runs the environment that a row's `env_config` names. Subclasses override parsing, formatting, or the hooks.

    The state of each rollout is kept under its request's `uuid`, by the names that ms-swift's subclasses use.
    """

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, *args, **kwargs)
        self._envs: dict[str | None, Any] = {}
        self._total_rewards: dict[str | None, float] = {}
        self._step_rewards: dict[str | None, list[float]] = {}
        self._pending_obs: dict[str | None, str | None] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def _close_and_remove(self, uuid: str | None) -> None:
        """Closes a rollout's environment and drops its state."""
        env = self._envs.pop(uuid, None)
        for state in (self._total_rewards, self._step_rewards, self._pending_obs):
            state.pop(uuid, None)
        if env is not None:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await call_user_function(env.close)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        try:
            return await super().run(infer_request, request_config, **kwargs)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close_and_remove(infer_request.uuid)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            config = {**getattr(self, "env_config_defaults", {}), **(request.data_dict.get("env_config") or {})}
            env = self._envs[request.uuid] = await call_user_function(self._create_env, config)
            observation, _ = await call_user_function(env.reset)
            system = config.get("system_message")
            text = await call_user_function(self.format_observation, observation)
            request.messages = [{"role": "system", "content": system}] if system else []
            request.messages.append({"role": "user", "content": text})
            self._total_rewards[request.uuid], self._step_rewards[request.uuid] = 0.0, []

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        uuid = infer_request.uuid
        action = await call_user_function(self.parse_action, response_choice.message.content)
        observation, reward, done, _ = await call_user_function(self._envs[uuid].step, action)
        self._total_rewards[uuid] += float(reward)
        self._step_rewards[uuid].append(float(reward))
        self._pending_obs[uuid] = None if done else await call_user_function(self.format_observation, observation)
        infos = {"total_reward": self._total_rewards[uuid], "step_rewards": [*self._step_rewards[uuid]]}
        return {"done": bool(done), "rollout_infos": {**infos, "gym_done": bool(done)}}

    async def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        observation = self._pending_obs.pop(infer_request.uuid, None)
        if observation is not None:
            infer_request.messages.append({"role": "user", "content": observation})
        return {"infer_request": infer_request}

    def parse_action(self, text: str) -> dict[str, Any]:
        """The action in the policy's text: a JSON object, in a code block or not, or else `{"message": text}`."""
        text = text.strip()
        lines = text.splitlines()
        if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip().startswith("```"):
            text = "\n".join(lines[1:-1]).strip()
        try:
            action = json.loads(text)
        except ValueError:
            return {"message": text}
        return action if isinstance(action, dict) else {"message": str(action)}

    def format_observation(self, observation: Any) -> str:
        """The observation as text for the policy."""
        return json.dumps(observation, ensure_ascii=False, default=str)
