"""Records a gateway's requests and answers on a tape, without changing them.

Lines are written whole or not at all; after a failed write the recording stops.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import anyio
from anyio import to_thread

from gateway.errors import GatewayError, SessionError, TooManySessions
from gateway.large_json import is_large, run_beside
from gateway.session import CANCELLED, CallScope
from gateway.session_protocols import SessionMethods, open_session
from gateway.tape.line_format import (
    Answer,
    AnswerT,
    RequestHistory,
    RequestKey,
    TapeLine,
    digest_call,
    digest_feedback,
    encode_answer,
    encode_task,
)
from gateway.tape.tape_writer import TapeWriter
from gateway.types import DEFAULT_CONTEXT, EMPTY, Context, Feedback, Outcome, Task, ToolCall, ToolResult
from gateway.wire import to_plain

if TYPE_CHECKING:
    from gateway.gateway import Gateway


log = logging.getLogger(__name__)

CANCELLED_FEEDBACK = Feedback(outcome=Outcome.CANCELLED, reason="cancelled by its caller")


def record_gateway(gateway: Gateway, path: str | Path) -> Gateway:
    """The gateway, recorded on a new tape at `path`; it can be used wherever the gateway itself can."""
    return cast("Gateway", RecordedGateway(gateway, path))


class RecordedGateway:
    """Records the sessions of anything with a gateway's interface; everything else is passed on to it unchanged."""

    def __init__(self, inner: Any, path: str | Path) -> None:
        self._inner = inner
        self._path = Path(path)
        self._tape_writer: TapeWriter | None = None
        self._open: set[RecordedSession] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        try:
            self._tape_writer = await to_thread.run_sync(TapeWriter, self._path)
            self._tape_writer.write_header(self._inner.specs)
        except BaseException as error:
            await self._inner.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        writer = self._writer
        try:
            await self._inner.__aexit__(kind, error, trace)
        finally:
            for session in list(self._open):
                session.write_end()
            writer.close()
        if writer.failure is not None and error is None:
            raise GatewayError(writer.failure)

    @property
    def recording_error(self) -> OSError | None:
        """Why the recording has stopped, if it has; every request fails since then."""
        return None if self._tape_writer is None else self._tape_writer.error

    @property
    def _writer(self) -> TapeWriter:
        if self._tape_writer is None:
            raise GatewayError(
                "the recording has not started: enter it first, `async with record_gateway(...) as gateway`"
            )
        return self._tape_writer

    def open(self, task: Task = Task()) -> AbstractAsyncContextManager[RecordedSession]:  # noqa: B008 - frozen
        return open_session(partial(self.begin, task))

    async def begin(self, task: Task) -> RecordedSession:
        writer = self._writer
        inner = await self._begin_inner(task, writer)
        try:
            session = RecordedSession(inner, task, writer, self._open)
            writer.write(
                session.build_open_line(
                    writer.get_listing_number(self._inner.specs), writer.get_listing_number(inner.specs)
                )
            )
        except GatewayError:
            await inner.close(is_abandoned=True)
            raise
        register = getattr(self._inner, "sessions", None)
        if isinstance(register, dict):
            # Expiry and lookups by id must find the recorded session.
            register[inner.id] = session
        self._open.add(session)
        return session

    async def _begin_inner(self, task: Task, writer: TapeWriter) -> Any:
        try:
            return await self._inner.begin(task)
        except TooManySessions:
            raise  # not because of the task, so it is not recorded
        except SessionError as error:
            writer.try_write({"kind": "unopened", "task": encode_task(task), "refused": str(error)})
            raise


class RecordedSession(SessionMethods):
    """A session whose requests are recorded when they are answered, or as cancelled when their caller goes away."""

    def __init__(self, inner: Any, task: Task, writer: TapeWriter, open_sessions: set[RecordedSession]) -> None:
        self.number = writer.new_session_number()
        self._inner, self._task, self._writer, self._open_sessions = inner, task, writer, open_sessions
        self._history = RequestHistory(task)
        self._messages: list[Any] = []
        self._is_finished = False
        self._is_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def build_open_line(self, offered: int, specs: int) -> TapeLine:
        """The `open` line: `offered` and `specs` are the listings of the gateway and of this session."""
        fields = {"task": encode_task(self._task), "interaction": _interaction_name(self._inner)}
        return {"kind": "open", "session": self.number} | fields | {"offered": offered, "specs": specs}

    async def call(
        self, call: ToolCall, context: Context = DEFAULT_CONTEXT, scope: CallScope | None = None
    ) -> ToolResult:
        return (await self.calls((call,), context, scope))[0]

    async def calls(
        self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT, scope: CallScope | None = None
    ) -> list[ToolResult]:
        kind = {"kind": "call", "audience": context.audience}
        lines: list[TapeLine] = [
            kind | {"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls
        ]
        keys = self._add_to_history([digest_call(call, context.audience) for call in calls])
        results = [CANCELLED] * len(calls)
        with nullcontext() if scope is None else scope.open():
            results = await self._record(lines, keys, lambda: self._inner.calls(calls, context), CANCELLED)
        return results

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        """Messages repeat all earlier turns, so only the new ones are written."""
        read = partial(_read_turns, messages, self._messages)
        turns, shared_count, digest = await run_beside(read) if is_large(messages) else read()
        self._messages = turns

        async def send_request() -> list[Feedback]:
            return [await self._inner.feedback(messages)]

        line: TapeLine = {"kind": "feedback", "same": shared_count, "messages": turns[shared_count:]}
        keys = self._add_to_history([digest])
        return (await self._record([line], keys, send_request, CANCELLED_FEEDBACK))[0]

    async def finish(self) -> Mapping[str, float]:
        rewards: Mapping[str, float] = await self._inner.finish()
        if not self._is_finished:
            self._is_finished = True
            self._writer.write(self._build_finish_line(rewards))
        return rewards

    async def close(self, *, is_abandoned: bool = False) -> None:
        await self._inner.close(is_abandoned=is_abandoned)
        self.write_end()

    def write_end(self) -> None:
        """Writes the last lines. The inner session is closed by now, and its rewards are final, if it has them."""
        if self._is_ended:
            return
        self._is_ended = True
        self._open_sessions.discard(self)
        if not self._is_finished and getattr(self._inner, "has_rewards", True):
            self._writer.try_write(
                self._build_finish_line({r.source: r.value for r in self._inner.rewards if r.kind == "end"})
            )
        self._writer.try_write({"kind": "close", "session": self.number})

    def _build_finish_line(self, rewards: Mapping[str, float]) -> TapeLine:
        line = {"kind": "finish", "session": self.number, "after": self._history.digest}
        states = dict(getattr(self._inner, "states", EMPTY))
        counts = {reward.source: reward.value for reward in self._inner.rewards if reward.kind == "count"}
        return line | {"rewards": {**rewards, **counts}} | ({"states": states} if states else {})

    def _add_to_history(self, requests: Sequence[str]) -> list[RequestKey]:
        keys = self._history.keys(requests)
        self._history.add(requests)
        return keys

    async def _record(
        self,
        lines: Sequence[TapeLine],
        keys: Sequence[RequestKey],
        send_request: Callable[[], Awaitable[list[AnswerT]]],
        cancelled: Answer,
    ) -> list[AnswerT]:
        keyed = [
            {"kind": line["kind"], "session": self.number, "after": key.after, "nth": key.nth} | line
            for line, key in zip(lines, keys, strict=True)
        ]
        try:
            answers = await send_request()
            answered = [
                await self._writer.encode_answered(line, answer) for line, answer in zip(keyed, answers, strict=True)
            ]
        except GatewayError as error:
            if not self._is_ended:
                self._writer.try_write(*(line | {"refused": str(error)} for line in keyed))
            raise
        except anyio.get_cancelled_exc_class():
            self._writer.try_write(*(line | {"answer": encode_answer(cancelled, {})} for line in keyed))
            raise
        self._writer.write_encoded(answered)
        return answers


def _read_turns(messages: Sequence[Mapping[str, Any]], earlier: list[Any]) -> tuple[list[Any], int, str]:
    """The messages as JSON, how many of them are the earlier ones, and their digest."""
    turns: list[Any] = to_plain(messages)
    shared_count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, turns, strict=False)))
    return turns, shared_count, digest_feedback(turns)


def _interaction_name(session: Any) -> str | None:
    """The name of a session's interaction, in this process or in a remote gateway."""
    name = getattr(getattr(session, "feedback_session", session), "name", None)
    return name if isinstance(name, str) else None
