"""Between two turns of the policy stands a plug-in with two verbs: is it finished, and what comes next."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from gateway.content import content
from gateway.content import messages as tool_messages
from gateway.session import AnySession
from gateway.types import Context, Outcome, Part, Text, ToolCall, ToolResult, ToolSpec
from trainer.config import RolloutLimits
from trainer.engine.base import Sampling
from trainer.ledger import NOTHING, Author, Ledger, Message
from trainer.parse.base import Reply
from trainer.run.rollout import StopReason
from trainer.task import Task

if TYPE_CHECKING:
    from trainer.template import Template

OF_CALLS = "tools"
"""Of a step's information, what is known of each call; it stays with the step."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a plug-in sees: the policy has just written, and nobody has answered yet."""

    task: Task
    number: int
    """Of the policy's turns, from 1."""
    reply: Reply
    messages: Sequence[Message]
    """The chat so far, this turn included."""
    ledger: Ledger
    session: AnySession
    context: Context


@dataclass(frozen=True, slots=True)
class Step:
    """What comes next: new messages (a new round), or text inserted into the unfinished turn (a continuation)."""

    author: Author = Author.FEEDBACK
    messages: tuple[Message, ...] = ()
    insert: str = ""
    """Goes into the policy's turn, which it then goes on with; masked like everything the policy did not write. Behind
    messages, it begins the next turn."""
    keep: int | None = None
    """Of a turn that is gone into, so many ids stay, and the others are taken back; by default all."""
    history: tuple[Message, ...] | None = None
    """In place of `messages`: the whole chat, which is another from here on, so that a new ledger begins."""
    parts: tuple[Part, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    reward: float | None = None
    stop: StopReason | None = None
    """The rollout ends here; the messages are kept, and nobody reads them."""
    reason: str = ""
    source: str = ""
    info: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """Reaches the reward functions."""


class Stepper(Protocol):
    """Either verb may be async. One object serves all rollouts at once, so it keeps no state of one."""

    def check_finished(self, turn: Turn) -> bool | StopReason | Awaitable[bool | StopReason]:
        """Asked after every turn; a reason says why, True is `step_done`."""
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]: ...


@dataclass(frozen=True, slots=True)
class Opening:
    """What a plug-in is told of a rollout before the policy writes."""

    key: str
    """Names the rollout, and no other."""
    task: Task
    specs: Sequence[ToolSpec]
    template: Template
    limits: RolloutLimits
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Closing:
    """What a plug-in leaves of a rollout that is over."""

    infos: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """Reaches the reward functions."""
    left_out: Sequence[Sequence[tuple[int, int]]] = ()
    """Of each of the policy's turns, over all ledgers, the spans of its ids that nothing is learned from."""


class Following(Stepper, Protocol):
    """A plug-in that follows one rollout alone, from its opening to its end."""

    async def over(self, turn: Turn | None, why: StopReason) -> Closing:
        """Asked at the end, unless infrastructure failed; with the turn that nobody answered, if there is one."""
        ...


class Begins(Stepper, Protocol):
    """A plug-in that is begun for each rollout, and says what the policy is told first."""

    def begin(self, opening: Opening) -> AbstractAsyncContextManager[tuple[Step, Following]]: ...


@asynccontextmanager
async def begun(stepper: Stepper, opening: Opening) -> AsyncIterator[tuple[Step, Stepper | Following]]:
    """What a rollout opens with, and what stands between its turns."""
    if not hasattr(stepper, "begin"):
        yield Step(history=opening.task.messages), stepper
        return
    async with cast(Begins, stepper).begin(opening) as made:
        yield made


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class ToolsAndFeedback:
    """The default: calls are answered by tools, and a turn without calls by the task's interaction."""

    def check_finished(self, turn: Turn) -> bool | StopReason:
        answered = turn.reply.calls or turn.reply.problems or turn.task.has_feedback
        return False if answered else StopReason.DONE

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls or turn.reply.problems:
            return await self._call(turn)
        return await self._hear(turn)

    async def _call(self, turn: Turn) -> Step:
        calls = turn.reply.calls
        results = await turn.session.calls(calls, turn.context) if calls else []
        wrong = tuple(ToolCall(f"malformed_{place}", "") for place in range(len(turn.reply.problems)))
        results += [ToolResult((Text(problem),), Outcome.INVALID) for problem in turn.reply.problems]
        rewards = [result.reward for result in results if result.reward is not None]
        broken = [result for result in results if result.outcome.infrastructure]
        stop = StopReason.TOOL_DONE if any(result.done for result in results) else None
        return Step(
            Author.TOOL,
            tuple(tool_messages((*calls, *wrong), results)),
            parts=tuple(part for result in results for part in result.parts),
            outcomes=tuple(result.outcome for result in results),
            reward=sum(rewards) if rewards else None,
            stop=StopReason.TOOL_FAILED if broken else stop,
            reason="; ".join(result.reason or result.outcome for result in broken),
            source=", ".join(dict.fromkeys(call.name for call in calls)) or "parser",
            info={OF_CALLS: [_told(call, result) for call, result in zip(calls, results, strict=False)]},
        )

    async def _hear(self, turn: Turn) -> Step:
        heard = await turn.session.feedback(turn.messages)
        failed = heard.outcome.infrastructure
        done = StopReason.FEEDBACK_DONE if heard.done else None
        return Step(
            Author.FEEDBACK,
            ({"role": "user", "content": content(heard.parts)},),
            parts=heard.parts,
            outcomes=(heard.outcome,),
            reward=None if failed else heard.score,
            stop=StopReason.TOOL_FAILED if failed else done,
            reason=heard.reason or "",
            source=turn.task.asked.feedback or "feedback",
            info=dict(heard.metadata),
        )


def _told(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    told = {"name": call.name, "outcome": result.outcome.value, "elapsed_s": result.elapsed_s}
    return told | ({"metrics": dict(result.metrics)} if result.metrics else {})


class ThinkAgain(ToolsAndFeedback):
    """A new round after an answer that a function finds wrong: the policy is told so, and tries once more."""

    def __init__(self, is_right: Any, text: str = "Your answer is wrong. Think again.", tries: int = 2) -> None:
        self.is_right, self.text, self.tries = is_right, text, tries

    async def check_finished(self, turn: Turn) -> bool | StopReason:  # type: ignore[override]
        if turn.reply.calls or turn.reply.problems:
            return False
        told = sum(entry.source == type(self).__name__ for entry in turn.ledger)
        if told >= self.tries - 1 or await settled(self.is_right(turn.reply.content, turn.task)):
            return StopReason.DONE
        return False

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls or turn.reply.problems:
            return await super().step(turn)
        return Step(messages=({"role": "user", "content": self.text},), source=type(self).__name__)


class BackIntoThinking(ThinkAgain):
    """A continuation: the thinking is opened again behind a wrong answer, within the same turn."""

    def __init__(self, is_right: Any, text: str = "\n<think>\nWait, that is wrong. ", tries: int = 2) -> None:
        super().__init__(is_right, text, tries)

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls or turn.reply.problems:
            return await super().step(turn)
        return Step(insert=self.text, source=type(self).__name__)
