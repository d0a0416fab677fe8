"""Replays a tape as a gateway: answers recorded requests with the same content, and raises an error for all others.

Sessions of one task are distinguished by their requests. Each starts as the recorded session that was replayed least,
takes that session's answers where there are any, else those of another session with the same requests so far. While a
session is open, no other session gets an answer that it took: more siblings at once than were recorded get an error,
except for tools declared `pure`. Closing releases the answers, so a tape can be replayed any number of times.
The order of calls within one message does not matter; the order of messages does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, Self

from anyio import to_thread

from gateway.errors import GatewayError, ReplayError, SessionError
from gateway.gateway import Gateway
from gateway.session import CANCELLED, CallScope, GatewaySession, Observer
from gateway.tape.line_format import (
    FINISH_DIGEST,
    AnswerT,
    RequestHistory,
    RequestKey,
    TapeLine,
    canonical_json,
    decode_feedback,
    decode_result,
    digest_call,
    digest_feedback,
    encode_task,
)
from gateway.tape.tape_file import AnswerEntry, SessionRecord, Tape, TapeItem, load_tape
from gateway.tool_table import Source, ToolTable
from gateway.types import DEFAULT_CONTEXT, EMPTY, Context, Feedback, Task, ToolCall, ToolResult, ToolSpec

MAX_COMPARED = 200
"""How many recorded requests are compared with the missing one."""
MAX_EXCERPT = 200
"""Characters of a request in a message."""


def no_session_error(tape: Tape, task: Task) -> ReplayError:
    """The error for a task that was not recorded: names similar ids, or the fields that differ."""
    recorded = [sessions[0].task for sessions in islice(tape.sessions_by_task.values(), MAX_COMPARED)]
    ids = _closest(repr(task.id), (repr(recorded_task["id"]) for recorded_task in recorded))
    problem = f"{tape.path}: no session was recorded for exactly this task {task.id!r}; recorded tasks: {ids}"
    same_id = next((recorded_task for recorded_task in recorded if recorded_task["id"] == task.id), None)
    if same_id is None:
        return ReplayError(problem)
    fields = encode_task(task)
    names = dict.fromkeys((*fields, *same_id))
    others = [
        name
        for name in names
        if name != "ttl_s" and canonical_json(fields.get(name)) != canonical_json(same_id.get(name))
    ]
    return ReplayError(f"{problem}. The recorded task with this id differs in: {', '.join(others)}")


def no_answer_error(tape: Tape, key: RequestKey, request: TapeLine, position: str) -> ReplayError:
    """The error for a request without a free answer: names what was recorded at this position instead."""
    problem = f"{tape.path}: {position}: {format_request(request)}"
    count = len(tape.entries(key))
    if count:
        return ReplayError(
            f"{problem} was recorded {count} times, and open sessions of this task hold every answer; "
            "close one, record more of them, or declare the tool `pure`"
        )
    answers = tape.answers.get(key.after, {})
    candidates = [entry for (request, _), entries in answers.items() if request != FINISH_DIGEST for entry in entries]
    if candidates:
        instead = f"At this point the tape has: {_similar_requests(tape, candidates, request)}"
    elif answers:
        instead = "At this point the recorded sessions end"
    else:
        entries = (entry for session in tape.sessions.values() for entry in session.entries)
        instead = (
            f"The earlier requests are not on it in this order; it has: {_similar_requests(tape, entries, request)}"
        )
    return ReplayError(f"{problem} is not on the tape. {instead}")


def format_request(line: TapeLine) -> str:
    """A request as text for messages."""
    if line["kind"] == "call":
        text = f"{line['name']}({line['arguments']})"
    elif line["kind"] == "feedback":
        text = f"feedback on {json.dumps(line['messages'][-1:], ensure_ascii=False, default=str)}"
    else:
        text = "the final rewards"
    return text if len(text) <= MAX_EXCERPT else text[: MAX_EXCERPT - 3] + "..."


def _similar_requests(tape: Tape, entries: Iterable[AnswerEntry], request: TapeLine) -> str:
    return _closest(
        format_request(request), (format_request(tape.read_line(entry)) for entry in islice(entries, MAX_COMPARED))
    )


def _closest(request: str, recorded: Iterable[str]) -> str:
    return ", ".join(get_close_matches(request, dict.fromkeys(recorded), n=3, cutoff=0.0)) or "nothing"


Blobs = Callable[[str], bytes]


class ReplayGateway(Gateway):
    """A gateway whose only source is a tape; it needs no servers, network or keys."""

    def __init__(self, path: str | Path) -> None:
        self._toolset = TapeToolset(Path(path))
        self._source = Source(f"tape {path}", self._toolset, backend=self._toolset, trusted=False, admit=None)
        super().__init__([self._source])

    def _make_session(self, id: str, task: Task, table: ToolTable, observers: Sequence[Observer]) -> GatewaySession:
        self._toolset.find_sessions(task)  # first, so that a task that was not recorded gets an error saying so
        return ReplaySession(id, task, table, observers, self.argument_checks, source=self._source)


class ReplaySession(GatewaySession):
    """A session that returns the tape's answers unchanged; they were checked and truncated when recorded."""

    def __init__(self, *args: Any, source: Source) -> None:
        super().__init__(*args)
        self._source = source
        self.sources = [source]

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._tape_session.specs

    @property
    def _tape_session(self) -> TapeSession:
        session: Any = self.source_sessions[id(self._source)]
        return session  # type: ignore[no-any-return]

    def task_for(self, source: Source) -> Task:
        return self.task

    async def hash_states(self) -> dict[str, str]:
        return dict(self._tape_session.states)

    async def call(
        self, call: ToolCall, context: Context = DEFAULT_CONTEXT, scope: CallScope | None = None
    ) -> ToolResult:
        return (await self.calls((call,), context, scope))[0]

    async def calls(
        self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT, scope: CallScope | None = None
    ) -> list[ToolResult]:
        self._touch()
        results = [CANCELLED] * len(calls)
        with nullcontext() if scope is None else scope.open():
            results = await self._tape_session.calls(calls, context)
        for call, result in zip(calls, results, strict=True):
            self._record_result(call, self._tools.get(call.name), result)
        return results


class TapeToolset:
    """A tape as a toolset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: Sequence[ToolSpec] = ()
        self._tape: Tape | None = None

    async def __aenter__(self) -> Self:
        self._tape = await to_thread.run_sync(load_tape, self.path)
        self.specs = self._tape.specs
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @property
    def tape(self) -> Tape:
        if self._tape is None:
            raise GatewayError("the tape is not loaded: enter it first, `async with ReplayGateway(path) as gateway`")
        return self._tape

    def find_sessions(self, task: Task) -> list[SessionRecord]:
        sessions = self.tape.find_sessions(task)
        if not sessions:
            raise no_session_error(self.tape, task)
        return sessions

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[TapeSession]:
        session = TapeSession(self.tape, task, self.find_sessions(task))
        try:
            yield session
        finally:
            session.release()


class TapeSession:
    """A session on a tape. It holds the answers it took until it is released."""

    def __init__(self, tape: Tape, task: Task, sessions: Sequence[SessionRecord]) -> None:
        record = min(sessions, key=usage)
        self.specs: Sequence[ToolSpec] = tape.listings[record.listing]
        self.name = record.interaction
        self.states: Mapping[str, str] = EMPTY
        """The recorded hashes of its states; known once it is finished."""
        self._tape, self._task = tape, task
        self._history = RequestHistory(task)
        self._followed_session = 0
        """The recorded session that gave the last answer."""
        self._held: list[TapeItem] = []
        self._hold(record)

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        return (await self.calls((call,), context))[0]

    async def calls(self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT) -> list[ToolResult]:
        lines: list[TapeLine] = [{"kind": "call", "name": call.name, "arguments": call.arguments} for call in calls]
        return await self._replay([digest_call(call, context.audience) for call in calls], lines, decode_result)

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        line: TapeLine = {"kind": "feedback", "messages": messages}
        return (await self._replay([digest_feedback(messages)], [line], decode_feedback))[0]

    async def finish(self) -> Mapping[str, float]:
        """The recorded final rewards; this is not a request of the policy, so the history stays as it is."""
        key = RequestKey(self._history.digest, FINISH_DIGEST, 0)
        entry = self._choose_entry(key, is_reusable=True)
        if entry is None:
            raise await self._refusal_error(key, {"kind": "finish"})
        line = await to_thread.run_sync(self._tape.read_line, entry)
        self.states = line.get("states", EMPTY)
        rewards: dict[str, float] = line["rewards"]
        return rewards

    def release(self) -> None:
        for item in self._held:
            item.holders -= 1
        self._held = []

    async def _replay(
        self, requests: Sequence[str], lines: Sequence[TapeLine], decode: Callable[[TapeLine, Blobs], AnswerT]
    ) -> list[AnswerT]:
        """The answers to all requests of a message, or an error that takes none, so the caller may try another."""
        entries = []
        for key, line in zip(self._history.keys(requests), lines, strict=True):
            entry = self._choose_entry(key, is_reusable=line.get("name") in self._tape.pure)
            if entry is None:
                raise await self._refusal_error(key, line)
            entries.append(entry)
        for entry in entries:
            self._hold(entry)
        self._history.add(requests)
        return await to_thread.run_sync(self._read, entries, decode)

    def _read(self, entries: Sequence[AnswerEntry], decode: Callable[[TapeLine, Blobs], AnswerT]) -> list[AnswerT]:
        lines = [self._tape.read_line(entry) for entry in entries]
        for line in lines:
            if "refused" in line:
                raise SessionError(line["refused"])
        return [decode(line["answer"], self._tape.read_blob) for line in lines]

    def _choose_entry(self, key: RequestKey, *, is_reusable: bool) -> AnswerEntry | None:
        """The answer of the recorded session that this one follows, else the one replayed least."""
        entries = self._tape.entries(key)
        free = [entry for entry in entries if not entry.holders]
        followed = next((entry for entry in free if entry.session == self._followed_session), None)
        return followed or min(free or (entries if is_reusable else ()), key=usage, default=None)

    def _hold(self, item: TapeItem) -> None:
        item.uses += 1
        item.holders += 1
        self._held.append(item)
        self._followed_session = item.session

    async def _refusal_error(self, key: RequestKey, line: TapeLine) -> ReplayError:
        position = f"a session of task {self._task.id!r} after {self._history.count} requests"
        return await to_thread.run_sync(no_answer_error, self._tape, key, line, position)


def usage(item: TapeItem) -> tuple[int, int]:
    """Sort key for choosing the item with the fewest users now, then the fewest so far."""
    return item.holders, item.uses
