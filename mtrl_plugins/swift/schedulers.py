"""ms-swift's multi-turn schedulers: request a turn from the engine, compute the next request, until finished."""

from __future__ import annotations

import inspect
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import anyio

from gateway.errors import ConfigError, safe_repr
from gateway.native.thread_pool import shared_threads
from mtrl_plugins.swift.orm import MathAccuracy, find_registered
from mtrl_plugins.swift.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    remove_response,
)


class RolloutEnded(Exception):
    """The rollout has ended: the engine answers no further requests of its scheduler."""


class SchedulerError(Exception):
    """An error in a user's scheduler, with its place."""


async def call_user_function(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function, sync (in a thread) or async, so that it does not block other rollouts."""
    return await shared_threads().run(function, *args)


class RolloutScheduler:
    """A scheduler with a single turn."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        self.infer_engine = infer_engine
        self._tokenizer = kwargs.get("tokenizer")
        self.max_turns = max_turns

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Called before the first turn; may change the request."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Called after a turn; may return `done`, which overrides `check_finished`, and `rollout_infos`."""
        return {}

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        ids = [list(response.choices[0].token_ids)]
        return RolloutOutput(
            response=response,
            messages=infer_request.messages,
            response_token_ids=ids,
            rollout_infos={"num_turns": 1},
        )

    @property
    def engine(self) -> Any:
        return self.infer_engine

    @property
    def tokenizer(self) -> Any:
        tokenizer = self.__dict__.get("_tokenizer")
        return tokenizer if tokenizer is not None else getattr(self.__dict__.get("infer_engine"), "tokenizer", None)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the scheduler does not have are the engine's."""
        engine = self.__dict__.get("infer_engine")
        if name.startswith("__") or not hasattr(engine, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(engine, name)


class MultiTurnScheduler(RolloutScheduler):
    """A scheduler with several turns: `step` computes the next request until `check_finished`."""

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        await call_user_function(self.on_trajectory_start, [infer_request])
        record = _TurnRecord(self, infer_request)
        while True:
            if not record.turns:
                remove_response(record.request.messages)
            try:
                response = await self.infer_engine.infer_async(record.request, request_config, **kwargs)
            except RolloutEnded:
                return record.output()
            if await record.turn(response):
                return record.output()
            await record.step(response.choices[0])

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Returns the next request: alone, in a pair with infos, or in a mapping as `infer_request`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither `step` nor `run`")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        is_last = bool(self.max_turns) and current_turn >= (self.max_turns or 0)
        return response_choice.finish_reason == "length" or is_last

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """Called by users' schedulers that are derived from ms-swift's."""
        return [item["logprob"] for item in (response_choice.logprobs or {}).get("content", ())]


class _TurnRecord:
    """The turns of a rollout so far, with their tokens, masks and infos."""

    def __init__(self, scheduler: MultiTurnScheduler, request: RolloutInferRequest) -> None:
        self.scheduler, self.request = scheduler, request
        self.turns = 0
        self.infos: dict[str, Any] = {}
        self.ids: list[list[int]] = []
        self.masks: list[list[int]] = []
        self.response: ChatCompletionResponse | None = None
        self._continues_turn = False

    async def turn(self, response: ChatCompletionResponse) -> bool:
        """Adds the policy's turn, and returns True if it was the last."""
        self.response, scheduler = response, self.scheduler
        choice, messages = response.choices[0], self.request.messages
        self.turns += 1
        if messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
            messages.pop()  # An empty message means that the turn continues.
        self._continues_turn = bool(messages) and messages[-1]["role"] == "assistant"
        if self._continues_turn:
            messages[-1]["content"] += choice.message.content
        else:
            messages.append({"role": "assistant", "content": choice.message.content})
        turn_end = await call_user_function(scheduler.on_turn_end, self.request, choice, self.turns) or {}
        self.infos.update(turn_end.get("rollout_infos") or {})
        finished = await call_user_function(scheduler.check_finished, self.request, choice, self.turns)
        finished = bool(turn_end.get("done", finished))
        finished = finished or bool(scheduler.max_turns and self.turns >= scheduler.max_turns)
        if finished:
            self._record_tokens(list(choice.token_ids or ()), None)
        return finished

    async def step(self, choice: ChatCompletionResponseChoice) -> None:
        returned = await call_user_function(self.scheduler.step, self.request, choice, self.turns)
        result = self._as_mapping(returned)
        ids, mask = result.get("response_token_ids"), result.get("response_loss_mask")
        if mask and (not ids or len(mask) != len(ids)):
            problem = f"`response_loss_mask` has {len(mask)} numbers for {len(ids or ())} `response_token_ids`"
            raise self._error(problem, "return one number per id")
        self._record_tokens(list(ids if ids else choice.token_ids or ()), mask)
        self.infos.update(result.get("rollout_infos") or {})
        self.request = result["infer_request"]

    def _as_mapping(self, returned: Any) -> dict[str, Any]:
        """The result of `step` as a mapping; before release 3.8 it was a request, or a pair with infos."""
        if isinstance(returned, tuple) and len(returned) == 2:
            returned = {"infer_request": returned[0], "rollout_infos": returned[1]}
        if not isinstance(returned, dict):
            returned = {"infer_request": returned}
        if not hasattr(returned.get("infer_request"), "messages"):
            problem = f"`step` returned {safe_repr(returned.get('infer_request'))} as the next request"
            raise self._error(problem, "return a request")
        return {**returned}

    def _error(self, problem: str, remedy: str) -> SchedulerError:
        code = inspect.unwrap(type(self.scheduler).step).__code__
        name = type(self.scheduler).__name__
        return SchedulerError(f"{code.co_filename}:{code.co_firstlineno}: {name}: {problem}; {remedy}")

    def _record_tokens(self, ids: list[int], mask: list[int] | None) -> None:
        mask = [1] * len(ids) if mask is None else list(mask)
        if self._continues_turn and self.ids:
            self.ids[-1] += ids
            self.masks[-1] += mask
        else:
            self.ids.append(ids)
            self.masks.append(mask)

    def output(self) -> RolloutOutput:
        if self.response is None:
            raise RolloutEnded
        return RolloutOutput(
            response=self.response,
            messages=self.request.messages,
            response_token_ids=self.ids,
            response_loss_mask=self.masks,
            rollout_infos={**self.infos, "num_turns": self.turns},
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
        return find_registered(envs, name, "env_config.name", "environment")(env_config)

    def _create_context_manager(self, ctx_config: dict[str, Any]) -> Any:
        name = ctx_config.get("name") or self.context_manager_name or "dummyContextManager"
        return find_registered(context_managers, name, "ctx_config.name", "context manager")(ctx_config)

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


THINKING_ENDS = ("<answer>", "</think>")
"""Texts that end the thinking of a turn."""


class _TipsScheduler(MultiTurnScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or MathAccuracy()

    def _is_correct(self, request: RolloutInferRequest, answer: str) -> bool:
        if "solution" not in request.data_dict:
            remedy = "add this column with the correct answers"
            raise ConfigError("the row has no such column", field="solution", remedy=remedy)
        return bool(self.acc_func([answer], [request.data_dict["solution"]])[0] == 1)


class MathTipsScheduler(_TipsScheduler):
    """Replaces the answer by a tip within the policy's turn, which continues."""

    tips_prompt = "Wait, that cannot be right. Let me look at it once more:"

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        answer = infer_request.messages[-1]["content"]
        if self.tips_prompt in answer or self._is_correct(infer_request, answer):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        last = infer_request.messages[-1]
        thinking = min((last["content"].partition(end)[0] for end in THINKING_ENDS), key=len)
        last["content"] = thinking + self.tips_prompt
        return {"infer_request": infer_request}


class ThinkingModelTipsScheduler(_TipsScheduler):
    """Gives the tip as a user turn, and removes the thinking of earlier turns."""

    tips_prompt = "That is not the right answer. Go through it again, step by step, and find the mistake."

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        *before, last = infer_request.messages
        if self.tips_prompt in before[-1]["content"] or self._is_correct(infer_request, last["content"]):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        for message in infer_request.messages:
            if message["role"] == "assistant":
                message["content"] = message["content"].rpartition("</think>")[2].strip()
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


multi_turns: dict[str, Any] = {
    "gym_scheduler": GYMScheduler,
    "math_tip_trick": MathTipsScheduler,
    "openenv_scheduler": OpenEnvScheduler,
    "thinking_tips_scheduler": ThinkingModelTipsScheduler,
}
