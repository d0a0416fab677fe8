"""Runs a scheduler's `run` as a task beside its rollout, and answers its engine requests with the policy's turns."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel

from gateway.await_user_code import await_user_code
from gateway.errors import describe_exception, safe_repr
from gateway.user_code import UserCode
from gateway.wire import to_plain
from mtrl_plugins.swift.chat_history import (
    ChatState,
    build_request,
    build_request_config,
    find_masked_spans,
    next_step,
    start_history,
)
from mtrl_plugins.swift.multi_turn_scheduler import RolloutEnded, RolloutScheduler, SchedulerError
from mtrl_plugins.swift.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from trainer.ledger import Entry
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, Turn

CHAT_INFO = "swift_messages"
"""The key of a rollout's infos with the scheduler's chat."""
_current: ContextVar[Trajectory] = ContextVar("the rollout of the running scheduler")


class Engine:
    """The `infer_engine` of schedulers, answered by the policy of the current rollout."""

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        return await _current.get().ask(infer_request, request_config)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None outside of a rollout."""
        current = _current.get(None)
        return None if current is None else current.opening.template.chat.hf_tokenizer


@dataclass
class _SchedulerResult:
    """The result of the scheduler's `run`."""

    outputs: list[RolloutOutput]
    error: SchedulerError | None = None


class Trajectory:
    """One rollout, from the scheduler's first request to the result of its `run`."""

    def __init__(self, scheduler: RolloutScheduler, opening: RolloutStart) -> None:
        self.scheduler, self.opening = scheduler, opening
        self.template = opening.template
        self.request = build_request(opening)
        self.config = build_request_config(opening)
        self.chat_state = ChatState([], 0)
        self.turns: list[tuple[int, ...]] = []
        """The ids of each of the policy's turns in the ledger."""
        self.ended: _SchedulerResult | None = None
        self._is_waiting = self._closed = False
        self._send_request, self._receive_request = anyio.create_memory_object_stream[
            RolloutInferRequest | _SchedulerResult
        ](1)
        self._send_response, self._receive_response = anyio.create_memory_object_stream[ChatCompletionResponse | None](
            1
        )

    async def __aenter__(self) -> tuple[Step, Trajectory]:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._tasks.start_soon(self._run)
            request = await self._receive_request.receive()
            if isinstance(request, _SchedulerResult):
                raise request.error or self._error("ended without a request to its engine")
            return self._first_step(request), self
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self._send_request, self._receive_request, self._send_response, self._receive_response):
            stream.close()
        self._tasks.cancel_scope.cancel()
        cancelled = kind is not None and issubclass(kind, anyio.get_cancelled_exc_class())
        await self._tasks.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    async def _run(self) -> None:
        _current.set(self)
        try:
            with UserCode(self.scheduler.run):
                result = await await_user_code(self.scheduler.run(self.request, self.config))
            outputs = result if isinstance(result, list) else [result]
            if not all(isinstance(output, RolloutOutput) for output in outputs):
                raise self._error(f"returned {safe_repr(result)} instead of a RolloutOutput")
            outcome = _SchedulerResult(outputs)
        except RolloutEnded:
            outcome = _SchedulerResult([])
        except SchedulerError as error:
            outcome = _SchedulerResult([], error)
        except Exception as error:  # boundary: a scheduler is the user's own, and may raise anything
            outcome = _SchedulerResult([], SchedulerError(f"{self._name}: {describe_exception(error)}"))
        try:
            await self._send_request.send(outcome)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # The rollout has ended.
            return

    async def ask(self, request: RolloutInferRequest, config: RequestConfig | None) -> ChatCompletionResponse:
        """The policy's next turn; called by the scheduler's task."""
        await anyio.lowlevel.checkpoint()  # A scheduler in a loop must not block other rollouts.
        if self._is_waiting:
            raise self._error("requests two turns at once", "await one before the next: a rollout is one chat")
        if config is not None and config != self.config:
            raise self._error("changes its `request_config`", "set `sampling` and `limits` for the whole run")
        if self._closed:
            raise RolloutEnded
        self._is_waiting = True
        try:
            await self._send_request.send(request)
            answer = await self._receive_response.receive()
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
            answer = None
        finally:
            self._is_waiting = False
        if answer is None:
            self._closed = True
            raise RolloutEnded
        return answer

    def check_finished(self, turn: Turn) -> bool:
        """Always False: the scheduler ends the rollout in `step`."""
        return False

    async def step(self, turn: Turn) -> Step:
        request = await self._send_turn(turn)
        if isinstance(request, _SchedulerResult):
            if request.error is not None:
                raise request.error
            return Step(stop=StopReason.STEP_DONE, source=self._name)
        self.chat_state, step = next_step(self.chat_state, request, self.template.tokenizer.decode)
        if step.keep_ids is not None:
            self.turns[-1] = self.turns[-1][: step.keep_ids]
        return replace(step, source=self._name)

    async def finish(self, turn: Turn | None, why: StopReason) -> RolloutEnd:
        """Gives the scheduler the last turn, and returns its infos and masked spans."""
        if self.ended is None and turn is not None:
            await self._send_turn(turn)
        if self.ended is None:
            await self._send_response.send(None)
            await self._next_request()
        outcome = self.ended or _SchedulerResult([])
        if outcome.error is not None:
            raise outcome.error
        infos: dict[str, Any] = {}
        for output in outcome.outputs:
            infos |= to_plain(output.rollout_infos)
        chat = outcome.outputs[-1].messages if outcome.outputs else None
        returned = [pair for output in outcome.outputs for pair in output.ids_and_masks]
        spans = find_masked_spans(self.turns, returned, frozenset(self.template.stop_ids))
        return RolloutEnd({**infos, CHAT_INFO: to_plain(chat or self.chat_state.whole)}, spans)

    def _first_step(self, request: RolloutInferRequest) -> Step:
        self.chat_state, step = start_history(request)
        first_request = build_request(self.opening)
        is_unchanged = (request.messages, request.images) == (first_request.messages, first_request.images)
        return replace(step, history=self.opening.task.messages) if is_unchanged else step

    async def _send_turn(self, turn: Turn) -> RolloutInferRequest | _SchedulerResult:
        """Sends the policy's turn to the scheduler, and returns its next request or result."""
        entry = turn.ledger.entries[-1]
        self.turns.append(entry.ids)
        ids = entry.ids[:-1] if self.template.is_turn_ended(entry.ids) else entry.ids
        text = self.template.tokenizer.decode(ids)
        continues = bool(self.chat_state.prefix)
        prefix = self.chat_state.prefix or self.template.prefill
        self.chat_state = replace(self.chat_state, prefix=prefix, text=text, ids=ids)
        content = text if continues else prefix + text
        await self._send_response.send(_build_response(turn, entry, content))
        return await self._next_request()

    async def _next_request(self) -> RolloutInferRequest | _SchedulerResult:
        request = await self._receive_request.receive()
        if isinstance(request, _SchedulerResult):
            self.ended = request
        return request

    @property
    def _name(self) -> str:
        return type(self.scheduler).__name__

    def _error(self, problem: str, remedy: str = "see `run`") -> SchedulerError:
        code: Any = getattr(type(self.scheduler).run, "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
        return SchedulerError(f"{place}{self._name} {problem}; {remedy}")


def _build_response(turn: Turn, entry: Entry, content: str) -> ChatCompletionResponse:
    stop = "length" if entry.finish_reason == "length" else "stop"
    logprobs = {"content": [{"logprob": logprob} for logprob in entry.logprobs or ()]}
    message = ChatMessage("assistant", content)
    choice = ChatCompletionResponseChoice(0, message, stop, logprobs, list(entry.ids))
    before = len(turn.ledger) - len(entry.ids)
    usage = UsageInfo(before, len(entry.ids), len(turn.ledger))
    return ChatCompletionResponse("policy", [choice], usage, prompt_token_ids=list(turn.ledger.ids[:before]))
