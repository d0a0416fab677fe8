"""ms-swift's multi-turn schedulers: request a turn from the engine, compute the next request, until finished."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import anyio

from gateway.errors import safe_repr
from gateway.native.thread_pool import shared_threads
from mtrl_plugins.swift.orm import find_registered
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


multi_turns: dict[str, Any] = {"gym_scheduler": GYMScheduler}
