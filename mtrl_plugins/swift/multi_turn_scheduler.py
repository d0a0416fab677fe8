"""ms-swift's multi-turn schedulers: request a turn from the engine, compute the next request, until finished."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gateway.errors import safe_repr
from gateway.native.thread_pool import shared_threads
from mtrl_plugins.swift.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
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
