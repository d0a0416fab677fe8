"""A recorded gateway is the gateway, with a tape running: it changes nothing that passes through it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import anyio
from anyio import to_thread

from gateway.errors import GatewayError, SessionError, TooManySessions
from gateway.plain import plain
from gateway.session import CANCELLED
from gateway.tape.asked import History, Key, called, told
from gateway.tape.lines import Answer, Line, answer_line, task_line
from gateway.tape.write import Writer
from gateway.types import ALONE, Context, Feedback, Outcome, Task, ToolCall, ToolResult

if TYPE_CHECKING:
    from gateway.gateway import Gateway

AnswerT = TypeVar("AnswerT", ToolResult, Feedback)

UNHEARD = Feedback(outcome=Outcome.CANCELLED, reason="cancelled by its caller")


def recorded(gateway: Gateway, path: str | Path) -> Gateway:
    """A gateway that writes its traffic to a new tape at `path`; it stands wherever the gateway itself could."""
    return cast("Gateway", Recorded(gateway, path))


class Recorded:
    """Before anything with a gateway's interface; what is not traffic is the inner gateway's own."""

    def __init__(self, inner: Any, path: str | Path) -> None:
        self._inner = inner
        self._path = Path(path)
        self._tape: Writer | None = None
        self._open: set[RecordedSession] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        try:
            self._tape = await to_thread.run_sync(Writer, self._path)
            self._tape.header(self._inner.specs)
        except BaseException as error:
            await self._inner.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tape = self._running
        try:
            await self._inner.__aexit__(kind, error, trace)
        finally:
            for session in list(self._open):
                session.end()
            tape.close()
        if tape.failure is not None and error is None:
            raise GatewayError(tape.failure)

    @property
    def _running(self) -> Writer:
        if self._tape is None:
            raise GatewayError("nothing is recorded yet: enter it first, `async with recorded(...) as gateway`")
        return self._tape

    @asynccontextmanager
    async def open(self, task: Task = Task()) -> AsyncIterator[RecordedSession]:  # noqa: B008 - frozen
        session = await self.begin(task)
        try:
            yield session
        finally:
            await session.close()

    async def begin(self, task: Task) -> RecordedSession:
        tape = self._running
        inner = await self._begun(task, tape)
        try:
            session = RecordedSession(inner, task, tape, self._open)
            tape.write(session.opening(tape.listing(self._inner.specs), tape.listing(inner.specs)))
        except GatewayError:
            await inner.close()
            raise
        register = getattr(self._inner, "sessions", None)
        if isinstance(register, dict):
            # A session that expires, or is looked up by its id, is the recorded one too.
            register[inner.id] = session
        self._open.add(session)
        return session

    async def _begun(self, task: Task, tape: Writer) -> Any:
        try:
            return await self._inner.begin(task)
        except TooManySessions:
            raise  # says nothing of the task
        except SessionError as error:
            tape.note({"kind": "unopened", "task": task_line(task), "refused": str(error)})
            raise


class RecordedSession:
    """A question is on the tape once it is answered; one whose asker went away is on it as cancelled."""

    def __init__(self, inner: Any, task: Task, tape: Writer, others: set[RecordedSession]) -> None:
        self.number = tape.session()
        self._inner, self._task, self._tape, self._others = inner, task, tape, others
        self._history = History(task)
        self._messages: list[Any] = []
        self._finished = False
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def opening(self, offered: int, specs: int) -> Line:
        told = {"task": task_line(self._task), "interaction": _interaction(self._inner)}
        return {"kind": "open", "session": self.number} | told | {"offered": offered, "specs": specs}

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        return (await self.calls((call,), context))[0]

    async def calls(self, calls: Sequence[ToolCall], context: Context = ALONE) -> list[ToolResult]:
        kind = {"kind": "call", "audience": context.audience}
        lines: list[Line] = [kind | {"id": one.id, "name": one.name, "arguments": one.arguments} for one in calls]
        keys = self._asked([called(call, context.audience) for call in calls])
        return await self._answered(lines, keys, lambda: self._inner.calls(calls, context), CANCELLED)

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        """A turn holds all turns before it, so the tape takes only what is new."""
        said: list[Any] = plain(messages)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._messages, said, strict=False)))
        self._messages = said

        async def ask() -> list[Feedback]:
            return [await self._inner.feedback(messages)]

        line: Line = {"kind": "feedback", "same": same, "messages": said[same:]}
        return (await self._answered([line], self._asked([told(said)]), ask, UNHEARD))[0]

    async def finish(self) -> Mapping[str, float]:
        rewards: Mapping[str, float] = await self._inner.finish()
        if not self._finished:
            self._finished = True
            self._tape.write(self._last(rewards))
        return rewards

    async def close(self) -> None:
        await self._inner.close()
        self.end()

    def end(self) -> None:
        """The last lines. The inner session is closed by now, and its rewards are what they will be."""
        if self._ended:
            return
        self._ended = True
        self._others.discard(self)
        if not self._finished:
            self._tape.note(self._last({r.source: r.value for r in self._inner.rewards if r.kind == "end"}))
        self._tape.note({"kind": "close", "session": self.number})

    def _last(self, rewards: Mapping[str, float]) -> Line:
        line = {"kind": "finish", "session": self.number, "after": self._history.digest}
        return line | {"rewards": dict(rewards)}

    def _asked(self, questions: Sequence[str]) -> list[Key]:
        keys = self._history.keys(questions)
        self._history.add(questions)
        return keys

    async def _answered(
        self,
        lines: Sequence[Line],
        keys: Sequence[Key],
        ask: Callable[[], Awaitable[list[AnswerT]]],
        cancelled: Answer,
    ) -> list[AnswerT]:
        placed = [
            {"kind": line["kind"], "session": self.number, "after": key.after, "nth": key.nth} | line
            for line, key in zip(lines, keys, strict=True)
        ]
        try:
            answers = await ask()
            kept = [await self._tape.kept(answer) for answer in answers]
        except GatewayError as error:
            if not self._ended:
                self._tape.note(*(line | {"refused": str(error)} for line in placed))
            raise
        except anyio.get_cancelled_exc_class():
            self._tape.note(*(line | {"answer": answer_line(cancelled, {})} for line in placed))
            raise
        self._tape.write(*(line | {"answer": answer} for line, answer in zip(placed, kept, strict=True)))
        return answers


def _interaction(session: Any) -> str | None:
    """The name of the interaction that answers in a session, here or across a border."""
    name = getattr(getattr(session, "heard", session), "name", None)
    return name if isinstance(name, str) else None
