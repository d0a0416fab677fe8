"""Commands from rank 0 to the other ranks, their answers, and what rank 0 says of one that fails or is stuck.

Rank 0 announces each command in the store, all ranks carry it out together, and each other rank answers when it is
done. One command runs at a time, whichever thread asks for it, so that all ranks make the same collective calls in one
order.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from io import BytesIO
from threading import Lock
from typing import Any

from trainer.algorithms.train_batch import TrainBatch
from trainer.distributed.connect_ranks import STAGE_KEY, ProcessGroupRanks
from trainer.distributed.errors import LostRankError, RankError
from trainer.distributed.rank_failures import (
    STUCK_REMEDY,
    RankFailure,
    describe_failure,
    is_connection_error,
    print_failure,
    read_failures,
    report_failure,
)
from trainer.policy.memory_plan import is_out_of_memory


def write_batch(batch: TrainBatch) -> bytes:
    """The batch, pickled by sequence: no single call holds the interpreter for long; what sequences share is
    there once.

    Ranks trust each other, as in torch's own exchange of objects.
    """
    stream = BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
    for part in (replace(batch, sequences=()), *batch.sequences):
        pickler.dump(part)
    return stream.getvalue()


def read_batch(content: bytes) -> TrainBatch:
    """The batch, equal to the one that was written."""
    stream = BytesIO(content)
    unpickler = pickle.Unpickler(stream)  # noqa: S301 - rank 0 of this run wrote it
    batch: TrainBatch = unpickler.load()
    sequences = []
    while stream.tell() < len(content):
        sequences.append(unpickler.load())
    return replace(batch, sequences=tuple(sequences))


COMMAND_KEY, ANSWER_KEY = "command/{}", "answer/{}/{}"
IDLE_WAIT = timedelta(seconds=60)
"""How long a rank waits for a command before it waits again: rollouts may take hours."""
FAILURE_WAIT_S = 10.0
"""How long rank 0 waits for the others' own words after its contact with them broke."""
HUNG_S = 5.0
"""Without a heartbeat for so long, a rank that is late will say nothing either."""
POLL_S = 0.1
END = "end"
RANK_REMEDY = "fix this, then continue with --resume"
KILLED_REMEDY = (
    "if nobody killed it, look at the machine's memory, the rank's log and the launcher's messages; continue with"
    " --resume"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """What all ranks do together."""

    number: int
    name: str
    arguments: Mapping[str, Any]
    content: bytes


class LeaderChannel:
    """Rank 0's end."""

    def __init__(
        self, ranks: ProcessGroupRanks, find_ended: Callable[[], Mapping[int, str]], names: Mapping[int, str]
    ) -> None:
        """`find_ended` says which ranks' processes have ended, and how."""
        self.ranks, self.names = ranks, names
        self._find_ended = find_ended
        self._store = ranks.side_store
        self._lock, self._number, self.is_broken = Lock(), 0, False
        self.current = ""
        """The name of the latest command."""
        self.answers: list[Any] = []
        """What the other ranks answered to the latest command."""

    @contextmanager
    def command(self, name: str, arguments: Mapping[str, Any] | None = None, content: bytes = b"") -> Iterator[None]:
        """Announces a command, whose own part is the block, and waits for the answers of all."""
        with self._lock:
            if self.is_broken:
                raise LostRankError(f"{name!r} was not done: the ranks have lost each other", RANK_REMEDY)
            self._number += 1
            self.current = name
            try:
                self._announce(name, arguments or {}, content)
                yield
                self.ranks.report_waiting(f"waiting for the answers to {name!r}")
                self.answers = self._collect(name)
            except BaseException as error:
                self.is_broken = True
                self.ranks.watchdog.end_stage()
                if is_connection_error(error):
                    reason = str(error).strip().splitlines()[0][:300]
                    lost = LostRankError(f"the ranks lost each other in {name!r} ({reason})", RANK_REMEDY)
                    raise self.explain(name, has_timed_out=False) or lost from error
                if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    log.error("rank 0 failed in %r", name, exc_info=error)
                    problem = f"{self.names[0]}: {describe_failure(0, error).problem}"
                    raise LostRankError(problem, RANK_REMEDY) from error
                raise

    def _announce(self, name: str, arguments: Mapping[str, Any], content: bytes) -> None:
        self.ranks.report(name)
        text = json.dumps({"name": name, "arguments": arguments, "bytes": len(content)})
        self._store.set(COMMAND_KEY.format(self._number), text)
        if content:
            self.ranks.broadcast_bytes(content, len(content))

    def _collect(self, name: str) -> list[Any]:
        keys = [ANSWER_KEY.format(self._number, rank) for rank in range(1, self.ranks.size)]
        deadline = time.monotonic() + self.ranks.settings.timeout_s
        while not self._store.check(keys):
            is_late = time.monotonic() > deadline
            if is_late or read_failures(self._store, self.ranks.size) or self._find_lost(name):
                lost = LostRankError(f"{name!r} was not answered", STUCK_REMEDY)
                raise self.explain(name, has_timed_out=is_late) or lost
            time.sleep(POLL_S)
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in (COMMAND_KEY.format(self._number), *keys):
            self._store.delete_key(key)
        return answers

    def _find_lost(self, name: str) -> Mapping[int, str]:
        """Which processes have ended, and how; at the end of the run not those that were told to, and answered."""
        ended = self.find_ended()
        if name != END:
            return ended
        answered = {rank for rank in ended if self._store.check([ANSWER_KEY.format(self._number, rank)])}
        return {rank: how for rank, how in ended.items() if rank not in answered}

    def find_ended(self) -> Mapping[int, str]:
        """The ranks whose processes have ended, or show no sign of life, and how."""
        silent = self.ranks.watchdog.find_silent(self.ranks.settings.timeout_s)
        hung = {rank: f"has shown no sign of life for {silent_s:.0f} s" for rank, silent_s in silent.items()}
        return {**hung, **self._find_ended()}

    def explain(self, name: str, *, has_timed_out: bool) -> RankError | None:
        """Why the ranks lost each other during a command: a rank's own error, its end, or that it is stuck."""
        try:
            return self._explain(name, has_timed_out=has_timed_out)
        except RuntimeError as error:  # torchrun's agents serve the store.
            if not is_connection_error(error):
                raise
            return LostRankError(f"the launcher's agent, through which ranks meet, is lost in {name!r}", KILLED_REMEDY)

    def _explain(self, name: str, *, has_timed_out: bool) -> RankError | None:
        others, deadline = set(range(1, self.ranks.size)), time.monotonic() + FAILURE_WAIT_S
        while True:
            failures, ended = read_failures(self._store, self.ranks.size), self._find_lost(name)
            if cause := self._describe_cause(name, failures, {rank: how for rank, how in ended.items() if rank}):
                return cause
            silent = silent_now = others - failures.keys() - ended.keys()
            if has_timed_out:  # Those that are stopped say nothing more.
                silent_now = silent - self.ranks.watchdog.find_silent(HUNG_S).keys()
            if time.monotonic() > deadline or not silent_now:
                break
            time.sleep(POLL_S)
        return self._describe_silent(name, silent, has_timed_out) or self._describe_cause(name, failures, ended)

    def find_cause(self, name: str) -> RankError | None:
        """Why the run has to end, as far as it is known at once."""
        return self._describe_cause(name, read_failures(self._store, self.ranks.size), self.find_ended())

    def explain_late(self, own: RankFailure) -> RankError:
        """Who is late in a command, in which rank 0 itself has spent too long."""
        if cause := self.explain(self.current, has_timed_out=True):
            return cause
        if not own.is_lost:
            return LostRankError(f"{own.name} is late: {own.problem}", STUCK_REMEDY)
        waiting = [own, *read_failures(self._store, self.ranks.size).values()]
        described = "; ".join(f"{failure.name}: {failure.problem}" for failure in waiting)
        return LostRankError(f"all ranks wait for each other in {self.current!r}: {described}", STUCK_REMEDY)

    def _describe_cause(
        self, name: str, failures: Mapping[int, RankFailure], ended: Mapping[int, str]
    ) -> RankError | None:
        """The first rank that failed by itself, or whose process has ended without a word."""
        if causes := {rank: failure for rank, failure in failures.items() if not failure.is_lost}:
            rank, failure = min(causes.items())
            kind = LostRankError if failure.is_unexpected else RankError
            return kind(f"{self.names[rank]}: {failure.problem}", failure.remedy or RANK_REMEDY)
        if killed := {rank: how for rank, how in ended.items() if rank not in failures}:
            rank, how = min(killed.items())
            seen = f", last seen in: {self._stage(rank)}" if rank else ""
            return LostRankError(f"{self.names[rank]} {how} during {name!r}{seen}", KILLED_REMEDY)
        return None

    def _describe_silent(self, name: str, silent: AbstractSet[int], has_timed_out: bool) -> RankError | None:
        """The error for ranks that neither answer nor say why; None if all have answered."""
        late = [rank for rank in silent if not self._store.check([ANSWER_KEY.format(self._number, rank)])]
        if not late:
            return None
        if not has_timed_out:
            described = "; ".join(f"{self.names[rank]}, last seen in: {self._stage(rank)}" for rank in late)
            return LostRankError(f"during {name!r} there was no answer any more from {described}", KILLED_REMEDY)
        described = "; ".join(f"{self.names[rank]} is late, and was last seen in: {self._stage(rank)}" for rank in late)
        problem = (
            f"the ranks waited for each other in {name!r} for up to {self.ranks.settings.timeout_s:g} s: {described}"
        )
        return LostRankError(problem, STUCK_REMEDY)

    def _stage(self, rank: int) -> str:
        key = STAGE_KEY.format(rank)
        return self._store.get(key).decode() if self._store.check([key]) else "its start"


class FollowerChannel:
    """The end of every other rank."""

    def __init__(self, ranks: ProcessGroupRanks) -> None:
        self.ranks, self._number = ranks, 0

    def serve(self, handlers: Mapping[str, Callable[[Command], Any]]) -> None:
        """Carries out commands until the end. After an error, which is reported to rank 0, nothing more is done."""
        while True:
            command = self._next()
            self.ranks.report(command.name)
            try:
                answer = None if command.name == END else handlers[command.name](command)
            except Exception as error:
                self.fail(error)
                raise
            self.ranks.report_waiting(f"waiting for a command after {command.name!r}")
            self.ranks.store.set(ANSWER_KEY.format(command.number, self.ranks.rank), json.dumps(answer))
            if command.name == END:
                return

    def fail(self, error: Exception) -> None:
        """Tells rank 0, or standard error if rank 0 is gone."""
        failure = describe_failure(self.ranks.rank, error)
        if not report_failure(self.ranks.store, self.ranks.rank, failure) and not failure.is_lost:
            print_failure(failure)

    def _next(self) -> Command:
        self._number += 1
        key = COMMAND_KEY.format(self._number)
        while True:
            try:
                self.ranks.store.wait([key], IDLE_WAIT)
                break
            except RuntimeError as error:
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise
        values = json.loads(self.ranks.store.get(key))
        content = b""
        if values["bytes"]:
            self.ranks.report(f"receiving {values['name']!r}")
            content = self.ranks.broadcast_bytes(b"", values["bytes"])
        return Command(self._number, values["name"], values["arguments"], content)
