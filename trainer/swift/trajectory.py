"""A scheduler's `run` goes on beside its rollout: what it asks its engine for, the policy of this rollout writes."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel

from gateway.errors import told
from gateway.plain import plain
from trainer.ledger import Entry
from trainer.run.rollout import StopReason
from trainer.steps import Closing, Opening, Step, Turn
from trainer.swift.alike import Known, left_out, next_step, opened
from trainer.swift.chat import config_of, request_of
from trainer.swift.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from trainer.swift.scheduler import RolloutOver, RolloutScheduler, SchedulerError

CHAT = "swift_messages"
"""Of a rollout's infos, the chat as its scheduler knows it."""
_here: ContextVar[Trajectory] = ContextVar("the rollout whose scheduler runs")


class Engine:
    """What schedulers call `infer_engine`: each is answered by the policy of its own rollout."""

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        return await _here.get().ask(infer_request, request_config)

    @property
    def tokenizer(self) -> Any:
        """The model's own; None before there is a rollout."""
        here = _here.get(None)
        return None if here is None else here.opening.template.chat.tokenizer


@dataclass
class _Ended:
    """The scheduler's `run` is over."""

    outputs: list[RolloutOutput]
    error: SchedulerError | None = None


class Trajectory:
    """One rollout, from the scheduler's first request to what its `run` gives."""

    def __init__(self, scheduler: RolloutScheduler, opening: Opening) -> None:
        self.scheduler, self.opening = scheduler, opening
        self.template = opening.template
        self.request = request_of(opening)
        self.config = config_of(opening)
        self.known = Known([], 0)
        self.turns: list[tuple[int, ...]] = []
        """Of each of the policy's turns, the ids that stand in the ledger."""
        self.ended: _Ended | None = None
        self._asking = self._closed = False
        self._asks, self._asked = anyio.create_memory_object_stream[RolloutInferRequest | _Ended](1)
        self._answers, self._answered = anyio.create_memory_object_stream[ChatCompletionResponse | None](1)

    async def __aenter__(self) -> tuple[Step, Trajectory]:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._tasks.start_soon(self._run)
            asked = await self._asked.receive()
            if isinstance(asked, _Ended):
                raise asked.error or self._wrong("ended before the policy was asked")
            return self._first(asked), self
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self._asks, self._asked, self._answers, self._answered):
            stream.close()
        self._tasks.cancel_scope.cancel()
        cancelled = kind is not None and issubclass(kind, anyio.get_cancelled_exc_class())
        await self._tasks.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    async def _run(self) -> None:
        _here.set(self)
        try:
            given = await self.scheduler.run(self.request, self.config)
            outputs = given if isinstance(given, list) else [given]
            if not all(isinstance(one, RolloutOutput) for one in outputs):
                raise self._wrong(f"gave {given!r:.80}, and no RolloutOutput")
            ended = _Ended(outputs)
        except RolloutOver:
            ended = _Ended([])
        except SchedulerError as error:
            ended = _Ended([], error)
        except (Exception, SystemExit) as error:  # boundary: a scheduler is the user's own, and may raise anything
            ended = _Ended([], SchedulerError(f"{self._name}: {told(error)}"))
        try:
            await self._asks.send(ended)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # Nobody follows it any more.
            return

    async def ask(self, request: RolloutInferRequest, config: RequestConfig | None) -> ChatCompletionResponse:
        """For the scheduler: what the policy writes next."""
        await anyio.lowlevel.checkpoint()  # So that whoever asks again and again holds nobody up.
        if self._asking:
            raise self._wrong("asks for two turns at once", "ask for one after the other: a rollout is one chat")
        if config is not None and config != self.config:
            raise self._wrong("changes its `request_config`", "set `sampling` and `limits` for the whole run")
        if self._closed:
            raise RolloutOver
        self._asking = True
        try:
            await self._asks.send(request)
            answer = await self._answered.receive()
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
            answer = None
        finally:
            self._asking = False
        if answer is None:
            self._closed = True
            raise RolloutOver
        return answer

    def check_finished(self, turn: Turn) -> bool:
        """The scheduler says so in `step`, once it knows what the policy wrote."""
        return False

    async def step(self, turn: Turn) -> Step:
        asked = await self._told(turn)
        if isinstance(asked, _Ended):
            if asked.error is not None:
                raise asked.error
            return Step(stop=StopReason.STEP_DONE, source=self._name)
        self.known, step = next_step(self.known, asked, self.template.tokens.decode)
        if step.keep is not None:
            self.turns[-1] = self.turns[-1][: step.keep]
        return replace(step, source=self._name)

    async def over(self, turn: Turn | None, why: StopReason) -> Closing:
        """What it still has to say of its last turn, and of all of them."""
        if self.ended is None and turn is not None:
            await self._told(turn)
        if self.ended is None:
            await self._answers.send(None)
            await self._heard()
        ended = self.ended or _Ended([])
        if ended.error is not None:
            raise ended.error
        infos: dict[str, Any] = {}
        for output in ended.outputs:
            infos |= plain(output.rollout_infos)
        chat = ended.outputs[-1].messages if ended.outputs else None
        returned = [pair for output in ended.outputs for pair in output.ids_and_masks]
        spans = left_out(self.turns, returned, frozenset(self.template.stop_ids))
        return Closing({**infos, CHAT: plain(chat or self.known.whole)}, spans)

    def _first(self, asked: RolloutInferRequest) -> Step:
        self.known, step = opened(asked)
        given = request_of(self.opening)
        same = (asked.messages, asked.images) == (given.messages, given.images)
        return replace(step, history=self.opening.task.messages) if same else step

    async def _told(self, turn: Turn) -> RolloutInferRequest | _Ended:
        """What the scheduler wants once it knows this turn."""
        entry = turn.ledger.entries[-1]
        self.turns.append(entry.ids)
        ids = entry.ids[:-1] if self.template.ended(entry.ids) else entry.ids
        written = self.template.tokens.decode(ids)
        goes_on = bool(self.known.begun)
        begun = self.known.begun or self.template.opened
        self.known = replace(self.known, begun=begun, said=written, ids=ids)
        content = written if goes_on else begun + written
        await self._answers.send(_response(turn, entry, content))
        return await self._heard()

    async def _heard(self) -> RolloutInferRequest | _Ended:
        asked = await self._asked.receive()
        if isinstance(asked, _Ended):
            self.ended = asked
        return asked

    @property
    def _name(self) -> str:
        return type(self.scheduler).__name__

    def _wrong(self, problem: str, remedy: str = "see `run`") -> SchedulerError:
        code: Any = getattr(type(self.scheduler).run, "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
        return SchedulerError(f"{place}{self._name} {problem}; {remedy}")


def _response(turn: Turn, entry: Entry, content: str) -> ChatCompletionResponse:
    stop = "length" if entry.stop == "length" else "stop"
    logprobs = {"content": [{"logprob": logprob} for logprob in entry.logprobs or ()]}
    message = ChatMessage("assistant", content)
    choice = ChatCompletionResponseChoice(0, message, stop, logprobs, list(entry.ids))
    before = len(turn.ledger) - len(entry.ids)
    usage = UsageInfo(before, len(entry.ids), len(turn.ledger))
    return ChatCompletionResponse("policy", [choice], usage, prompt_token_ids=list(turn.ledger.ids[:before]))
