"""A scheduler plays one rollout: it asks its engine for a turn, says what comes next, and ends when it has enough."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gateway.native.thread import Threads
from trainer.swift.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    remove_response,
)

_THREADS = Threads()


class RolloutOver(Exception):
    """The rollout has ended, and nothing more is written in it."""


class SchedulerError(Exception):
    """A mistake in a scheduler; the text is for whoever wrote it, and says where it is."""


async def called(function: Callable[..., Any], *args: Any) -> Any:
    """A user's own function, async or not: one that blocks holds no other rollout up."""
    return await _THREADS.run(function, *args)


class RolloutScheduler:
    """One turn, and no more."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        self.infer_engine = infer_engine
        self._tokenizer = kwargs.get("tokenizer")
        self.max_turns = max_turns

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Before the first turn; what it changes in the request is what the policy is told."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """After a turn; may give `done`, which overrules `check_finished`, and `rollout_infos`."""
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
        given = self.__dict__.get("_tokenizer")
        return given if given is not None else getattr(self.__dict__.get("infer_engine"), "tokenizer", None)

    def __getattr__(self, name: str) -> Any:
        """What a scheduler does not have, its engine may."""
        engine = self.__dict__.get("infer_engine")
        if name.startswith("__") or not hasattr(engine, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(engine, name)


class MultiTurnScheduler(RolloutScheduler):
    """Turn after turn: `check_finished` says when it is enough, and `step` what comes next."""

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        await called(self.on_trajectory_start, [infer_request])
        taken = _Taken(self, infer_request)
        while True:
            if not taken.turns:
                remove_response(taken.request.messages)
            try:
                response = await self.infer_engine.infer_async(taken.request, request_config, **kwargs)
            except RolloutOver:
                return taken.output()
            if await taken.turn(response):
                return taken.output()
            await taken.step(response.choices[0])

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """The next request, alone, or with its information beside it, or in a mapping as `infer_request`."""
        raise NotImplementedError(f"{type(self).__name__} has no `step`, and no `run` that does without")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        full = bool(self.max_turns) and current_turn >= (self.max_turns or 0)
        return response_choice.finish_reason == "length" or full

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """Schedulers derived from ms-swift's own ask for it by this name."""
        return [one["logprob"] for one in (response_choice.logprobs or {}).get("content", ())]


class _Taken:
    """The turns that were taken, and what was said of them."""

    def __init__(self, scheduler: MultiTurnScheduler, request: RolloutInferRequest) -> None:
        self.scheduler, self.request = scheduler, request
        self.turns = 0
        self.infos: dict[str, Any] = {}
        self.ids: list[list[int]] = []
        self.masks: list[list[int]] = []
        self.response: ChatCompletionResponse | None = None
        self._goes_on = False

    async def turn(self, response: ChatCompletionResponse) -> bool:
        """Whether it was the last one."""
        self.response, scheduler = response, self.scheduler
        choice, messages = response.choices[0], self.request.messages
        self.turns += 1
        if messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
            messages.pop()  # It stood there to say that the turn goes on.
        self._goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        if self._goes_on:
            messages[-1]["content"] += choice.message.content
        else:
            messages.append({"role": "assistant", "content": choice.message.content})
        ended = await called(scheduler.on_turn_end, self.request, choice, self.turns) or {}
        self.infos.update(ended.get("rollout_infos") or {})
        finished = await called(scheduler.check_finished, self.request, choice, self.turns)
        finished = bool(ended.get("done", finished))
        finished = finished or bool(scheduler.max_turns and self.turns >= scheduler.max_turns)
        if finished:
            self._told(list(choice.token_ids or ()), None)
        return finished

    async def step(self, choice: ChatCompletionResponseChoice) -> None:
        given = await called(self.scheduler.step, self.request, choice, self.turns)
        told = self._as_mapping(given)
        ids, mask = told.get("response_token_ids"), told.get("response_loss_mask")
        if mask and (not ids or len(mask) != len(ids)):
            problem = f"`response_loss_mask` has {len(mask)} numbers for {len(ids or ())} `response_token_ids`"
            raise self._wrong(problem, "give one for each id")
        self._told(list(ids if ids else choice.token_ids or ()), mask)
        self.infos.update(told.get("rollout_infos") or {})
        self.request = told["infer_request"]

    def _as_mapping(self, given: Any) -> dict[str, Any]:
        """Releases before 3.8 had a request, or a pair, with what reward functions are told as its second."""
        if isinstance(given, tuple) and len(given) == 2:
            given = {"infer_request": given[0], "rollout_infos": given[1]}
        if not isinstance(given, dict):
            given = {"infer_request": given}
        if not hasattr(given.get("infer_request"), "messages"):
            raise self._wrong(f"`step` gave {given.get('infer_request')!r:.80} as the next request", "give it back")
        return {**given}

    def _wrong(self, problem: str, remedy: str) -> SchedulerError:
        code = inspect.unwrap(type(self.scheduler).step).__code__
        name = type(self.scheduler).__name__
        return SchedulerError(f"{code.co_filename}:{code.co_firstlineno}: {name}: {problem}; {remedy}")

    def _told(self, ids: list[int], mask: list[int] | None) -> None:
        mask = [1] * len(ids) if mask is None else list(mask)
        if self._goes_on and self.ids:
            self.ids[-1] += ids
            self.masks[-1] += mask
        else:
            self.ids.append(ids)
            self.masks.append(mask)

    def output(self) -> RolloutOutput:
        if self.response is None:
            raise RolloutOver
        return RolloutOutput(
            response=self.response,
            messages=self.request.messages,
            response_token_ids=self.ids,
            response_loss_mask=self.masks,
            rollout_infos={**self.infos, "num_turns": self.turns},
        )
