"""A replayed gateway answers only what it was asked before, in the same words; it refuses rather than invents.

Sessions of one task are told apart by what they do. Each begins as the recorded session that was replayed least, takes
answers of that one where it has some, and otherwise those of another session that was asked the same up to here. While
a session is open, nobody else gets an answer that it took: more siblings at once than were recorded are refused, except
by tools declared `pure`. Closing gives everything back, so a tape can be replayed any number of times.
Of the calls of one message the order of the answers does not matter; calls made one by one are in the order made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from anyio import to_thread

from gateway.errors import GatewayError, ReplayError, SessionError
from gateway.gateway import Gateway
from gateway.session import GatewaySession
from gateway.table import Source
from gateway.tape.asked import FINISH, History, Key, called, told
from gateway.tape.lines import Line, feedback_of, result_of
from gateway.tape.read import Entry, Held, Opening, Tape, load
from gateway.tape.refuse import no_answer, no_session
from gateway.types import ALONE, Context, Feedback, Task, ToolCall, ToolResult, ToolSpec

AnswerT = TypeVar("AnswerT", ToolResult, Feedback)
Blobs = Callable[[str], bytes]


class Replay(Gateway):
    """A gateway whose one source is a tape: no server, no network, no key."""

    def __init__(self, path: str | Path) -> None:
        self._reel = Reel(Path(path))
        self._source = Source(f"tape {path}", self._reel, leaf=self._reel, ours=False, admit=None)
        super().__init__([self._source])

    def _session(self, id: str, task: Task) -> GatewaySession:
        self._reel.openings(task)  # so that a task which was not recorded is refused as such, whatever it asks for
        return ReplaySession(id, task, self.table, self.observers, source=self._source)


class ReplaySession(GatewaySession):
    """The tape's answers pass as they are: what was checked, measured and cut then is not again."""

    def __init__(self, *given: Any, source: Source) -> None:
        super().__init__(*given)
        self._source = source

    @property
    def sources(self) -> list[Source]:
        return [self._source]

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._played.specs

    @property
    def _played(self) -> Played:
        played: Any = self.inner[id(self._source)]
        return played  # type: ignore[no-any-return]

    def asks_of(self, source: Source) -> Task:
        return self.task

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        return (await self.calls((call,), context))[0]

    async def calls(self, calls: Sequence[ToolCall], context: Context = ALONE) -> list[ToolResult]:
        self._use()
        results = await self._played.calls(calls, context)
        for call, result in zip(calls, results, strict=True):
            self._note(call, self._tools.get(call.name), result)
        return results


class Reel:
    """The tape as a toolset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: Sequence[ToolSpec] = ()
        self._tape: Tape | None = None

    async def __aenter__(self) -> Self:
        self._tape = await to_thread.run_sync(load, self.path)
        self.specs = self._tape.specs
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    def tape(self) -> Tape:
        if self._tape is None:
            raise GatewayError("the tape is not read yet: enter it first, `async with Replay(path) as gateway`")
        return self._tape

    def openings(self, task: Task) -> list[Opening]:
        found = self.tape.opened(task)
        if not found:
            raise no_session(self.tape, task)
        return found

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Played]:
        played = Played(self.tape, task, self.openings(task))
        try:
            yield played
        finally:
            played.release()


class Played:
    """A session on a tape. What it takes is its own until it is released."""

    def __init__(self, tape: Tape, task: Task, openings: Sequence[Opening]) -> None:
        opening = min(openings, key=rarity)
        self.specs: Sequence[ToolSpec] = tape.listings[opening.listing]
        self.name = opening.interaction
        self._tape, self._task = tape, task
        self._history = History(task)
        self._voice = 0
        """The recorded session that gave the last answer."""
        self._taken: list[Held] = []
        self._take(opening)

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        return (await self.calls((call,), context))[0]

    async def calls(self, calls: Sequence[ToolCall], context: Context = ALONE) -> list[ToolResult]:
        asked: list[Line] = [{"kind": "call", "name": call.name, "arguments": call.arguments} for call in calls]
        return await self._answered([called(call, context.audience) for call in calls], asked, result_of)

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        asked: Line = {"kind": "feedback", "messages": messages}
        return (await self._answered([told(messages)], [asked], feedback_of))[0]

    async def finish(self) -> Mapping[str, float]:
        """Not a question of the policy's, so it adds nothing to what was asked."""
        key = Key(self._history.digest, FINISH, 0)
        entry = self._entry(key, again=True)
        if entry is None:
            raise await self._refusal(key, {"kind": "finish"})
        rewards: dict[str, float] = (await to_thread.run_sync(self._tape.line, entry))["rewards"]
        return rewards

    def release(self) -> None:
        for held in self._taken:
            held.holders -= 1
        self._taken = []

    async def _answered(
        self, questions: Sequence[str], asked: Sequence[Line], read: Callable[[Line, Blobs], AnswerT]
    ) -> list[AnswerT]:
        """All or none: a message that is refused in part may be asked again in other words."""
        entries = []
        for key, line in zip(self._history.keys(questions), asked, strict=True):
            entry = self._entry(key, again=line.get("name") in self._tape.pure)
            if entry is None:
                raise await self._refusal(key, line)
            entries.append(entry)
        for entry in entries:
            self._take(entry)
        self._history.add(questions)
        return await to_thread.run_sync(self._read, entries, read)

    def _read(self, entries: Sequence[Entry], read: Callable[[Line, Blobs], AnswerT]) -> list[AnswerT]:
        lines = [self._tape.line(entry) for entry in entries]
        for line in lines:
            if "refused" in line:
                raise SessionError(line["refused"])
        return [read(line["answer"], self._tape.blob) for line in lines]

    def _entry(self, key: Key, *, again: bool) -> Entry | None:
        """Of the answers to one question: that of the recorded session we follow, or the one replayed least."""
        entries = self._tape.entries(key)
        free = [entry for entry in entries if not entry.holders]
        own = next((entry for entry in free if entry.session == self._voice), None)
        return own or min(free or (entries if again else ()), key=rarity, default=None)

    def _take(self, held: Held) -> None:
        held.uses += 1
        held.holders += 1
        self._taken.append(held)
        self._voice = held.session

    async def _refusal(self, key: Key, asked: Line) -> ReplayError:
        place = f"a session of task {self._task.id!r} after {self._history.count} questions"
        return await to_thread.run_sync(no_answer, self._tape, key, asked, place)


def rarity(held: Held) -> tuple[int, int]:
    """Less is had by fewer now, then by fewer before; of equals the first recorded is the first replayed."""
    return held.holders, held.uses
