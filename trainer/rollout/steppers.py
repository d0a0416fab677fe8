"""Steppers decide after each policy turn: stop, answer it, or continue it (as ms-swift's multi-turn schedulers do).

The default answers with tools and feedback; a plug-in may replace it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from gateway.await_user_code import await_user_code
from gateway.chat_messages import chat_content, tool_messages
from gateway.errors import safe_repr
from gateway.native.thread_pool import shared_threads
from gateway.native.tool_results import is_plain
from gateway.session import AnySession
from gateway.types import EMPTY, Context, Outcome, Part, Text, ToolCall, ToolResult, ToolSpec
from trainer.engine.base import Sampling
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.parse.base import Reply
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from trainer.template import Template


CALLS_INFO = "tools"
"""The key in a step's info for details of each call, which are not passed on to reward functions."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a stepper sees: the policy's turn, before there is an answer to it."""

    task: Task
    number: int
    """The number of the policy's turn, from 1."""
    reply: Reply
    messages: Sequence[Message]
    """The chat so far, including this turn."""
    ledger: Ledger
    session: AnySession
    context: Context
    get_max_tokens: Callable[[], int] = int

    @property
    def max_tokens(self) -> int:
        """The most tokens that the ledger may have now; what sub-agents write while calls are made leaves fewer."""
        return self.get_max_tokens()


@dataclass(frozen=True, slots=True)
class Step:
    """What comes next: new messages (a new round), or text inserted into the unfinished turn (a continuation)."""

    author: Author = Author.FEEDBACK
    messages: tuple[Message, ...] = ()
    insert: str = ""
    """Text to insert into the policy's turn, which continues after it; excluded from the loss. Together with messages,
    it starts the next turn."""
    keep_ids: int | None = None
    """How many ids of the continued turn to keep; by default all."""
    history: tuple[Message, ...] | None = None
    """A whole new chat instead of the one so far; starts a new ledger. After it come `kept`, then `messages`."""
    kept: tuple[Entry, ...] = ()
    """Entries of the ledger so far that follow a new history as they are, up to the turn that `messages` answer. In the
    new ledger their ids are context, which is not trained again."""
    branch: str = ""
    """What begins with a new history, in words, for those who look at the rollout."""
    ignore_calls: bool = False
    """The policy's next turn is asked for something else: calls in it are not made; it counts for no limit of turns."""
    parts: tuple[Part, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    reward: float | None = None
    stop: StopReason | None = None
    """Ends the rollout; the messages are recorded, but the policy does not read them."""
    reason: str = ""
    source: str = ""
    info: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """Passed on to the reward functions."""


class Stepper(Protocol):
    """The interface of a plug-in. Methods may be async. One object serves all rollouts, so it must be stateless."""

    def check_finished(self, turn: Turn) -> bool | StopReason | Awaitable[bool | StopReason]:
        """Called after every turn; a stop reason or True (`step_done`) ends the rollout."""
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """The answer to the turn."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutStart:
    """What a stepper knows before the policy's first turn."""

    key: str
    """The unique name of the rollout."""
    task: Task
    specs: Sequence[ToolSpec]
    template: Template
    limits: RolloutLimits
    sampling: Sampling
    session: AnySession
    """The rollout's session on the gateway, for calls before the first turn."""


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """What a stepper adds to a finished rollout."""

    infos: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """Passed on to the reward functions."""
    excluded_spans: Sequence[Sequence[tuple[int, int]]] = ()
    """For each of the policy's turns, over all ledgers, the spans of its ids to exclude from the loss."""


@runtime_checkable
class RolloutStepper(Stepper, Protocol):
    """A stepper of a single rollout, which may keep state."""

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """Called at the end unless infrastructure failed, with the turn that was not answered, if there is one."""
        ...


@runtime_checkable
class StepperFactory(Stepper, Protocol):
    """A plug-in that creates a stepper and the opening messages for each rollout."""

    def begin(self, start: RolloutStart) -> AbstractAsyncContextManager[tuple[Step, RolloutStepper]]: ...


@asynccontextmanager
async def open_stepper(stepper: Stepper, start: RolloutStart) -> AsyncIterator[tuple[Step, Stepper | RolloutStepper]]:
    """The opening step and the stepper for one rollout."""
    if not isinstance(stepper, StepperFactory):
        yield Step(history=start.task.messages), stepper
        return
    async with stepper.begin(start) as opened:
        yield opened


async def check_finished(stepper: Stepper, turn: Turn) -> bool | StopReason:
    """Asks a stepper whether the rollout is finished."""
    finished = await call_method(stepper.check_finished, turn)
    if isinstance(finished, bool | StopReason):
        return finished
    return bool(finished if is_plain(finished) else await shared_threads().run(bool, finished))


async def take_step(stepper: Stepper, turn: Turn) -> Step:
    """Asks a stepper for the answer to a turn. Raises TypeError if it is no `Step`."""
    step = await call_method(stepper.step, turn)
    if not isinstance(step, Step):
        raise TypeError(f"{type(stepper).__name__}.step returned {safe_repr(step)}, not a Step")
    return step


async def call_method(method: Callable[..., Any], *args: Any) -> Any:
    """Calls a method of a plug-in. If users wrote it and it is not async, it runs in a thread, so that it can hang."""
    if (getattr(method, "__module__", None) or "").startswith("trainer."):
        value = method(*args)
        return await await_user_code(value) if inspect.isawaitable(value) else value
    return await shared_threads().run(method, *args)


class ToolsAndFeedback:
    """The default stepper: tools answer calls, and the task's interaction answers turns without calls."""

    def check_finished(self, turn: Turn) -> bool | StopReason:
        has_answer = turn.reply.calls or turn.reply.problems or turn.task.has_feedback
        return False if has_answer else StopReason.DONE

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls or turn.reply.problems:
            return await self._call_tools(turn)
        return await self._request_feedback(turn)

    async def _call_tools(self, turn: Turn) -> Step:
        calls = turn.reply.calls
        results = await turn.session.calls(calls, turn.context) if calls else []
        malformed = tuple(ToolCall(f"malformed_{index}", "") for index in range(len(turn.reply.problems)))
        results += [ToolResult((Text(problem),), Outcome.INVALID) for problem in turn.reply.problems]
        rewards = [result.reward for result in results if result.reward is not None]
        broken = [result for result in results if result.outcome.is_infrastructure]
        stop = StopReason.TOOL_DONE if any(result.done for result in results) else None
        return Step(
            Author.TOOL,
            tuple(tool_messages((*calls, *malformed), results)),
            parts=tuple(part for result in results for part in result.parts),
            outcomes=tuple(result.outcome for result in results),
            reward=sum(rewards) if rewards else None,
            stop=StopReason.TOOL_FAILED if broken else stop,
            reason="; ".join(result.reason or result.outcome for result in broken),
            source=", ".join(dict.fromkeys(call.name for call in calls)) or "parser",
            info={CALLS_INFO: [_call_info(call, result) for call, result in zip(calls, results, strict=False)]},
        )

    async def _request_feedback(self, turn: Turn) -> Step:
        feedback = await turn.session.feedback(turn.messages)
        failed = feedback.outcome.is_infrastructure
        done = StopReason.FEEDBACK_DONE if feedback.done else None
        return Step(
            Author.FEEDBACK,
            ({"role": "user", "content": chat_content(feedback.parts)},),
            parts=feedback.parts,
            outcomes=(feedback.outcome,),
            reward=None if failed else feedback.score,
            stop=StopReason.TOOL_FAILED if failed else done,
            reason=feedback.reason or "",
            source=turn.task.session_task.feedback or "feedback",
            info=dict(feedback.metadata),
        )


def _call_info(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    info: dict[str, Any] = {"name": call.name, "outcome": result.outcome.value, "elapsed_s": result.elapsed_s}
    info |= {} if result.reward is None else {"reward": result.reward}
    return info | ({"metrics": dict(result.metrics)} if result.metrics else {})


def find_failed_tools(rollout: Rollout) -> list[str]:
    """The tools whose failed calls ended a rollout."""
    if rollout.stop is not StopReason.TOOL_FAILED or not rollout.ledger.entries:
        return []
    calls = rollout.ledger.entries[-1].info.get(CALLS_INFO, ())
    return sorted({call["name"] for call in calls if Outcome(call["outcome"]).is_infrastructure})


class ThinkAgain(ToolsAndFeedback):
    """Retries in a new round: tells the policy that its answer is wrong, if `is_right` says so."""

    retries = 0
    """How often this rollout's policy was told so, over all its ledgers."""

    def __init__(self, is_right: Any, text: str = "Your answer is wrong. Think again.", tries: int = 2) -> None:
        self.is_right, self.text, self.tries = is_right, text, tries

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, Self]]:
        """A stepper of this rollout, which counts for it alone."""
        yield Step(history=start.task.messages), copy(self)

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        return RolloutEnd()

    async def check_finished(self, turn: Turn) -> bool | StopReason:  # type: ignore[override]
        if turn.reply.calls or turn.reply.problems:
            return False
        if self.retries >= self.tries - 1 or await call_method(self.is_right, turn.reply.content, turn.task):
            return StopReason.DONE
        return False

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls or turn.reply.problems:
            return await super().step(turn)
        self.retries += 1
        return Step(messages=({"role": "user", "content": self.text},), source=type(self).__name__)


class BackIntoThinking(ThinkAgain):
    """Retries in the same turn: reopens the reasoning after a wrong answer."""

    def __init__(self, is_right: Any, text: str = "\n<think>\nWait, that is wrong. ", tries: int = 2) -> None:
        super().__init__(is_right, text, tries)

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls or turn.reply.problems:
            return await super().step(turn)
        self.retries += 1
        return Step(insert=self.text, source=type(self).__name__)
