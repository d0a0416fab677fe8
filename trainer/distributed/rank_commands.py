"""Commands from rank 0 to the other ranks, their answers, and what rank 0 says of one that fails or is stuck.

Rank 0 announces each command in the store, all ranks carry it out together, and each other rank answers when it is
done. One command runs at a time, whichever thread asks for it, so that all ranks make the same collective calls in one
order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any

from trainer.algorithms.packing import NotFiniteError
from trainer.distributed.connect_ranks import STAGE_KEY, ProcessGroupRanks
from trainer.distributed.errors import LostRankError, RankError
from trainer.model import ModelError
from trainer.policy.errors import PolicyError
from trainer.policy.memory_plan import is_out_of_memory

COMMAND_KEY, ANSWER_KEY, FAILURE_KEY = "command/{}", "answer/{}/{}", "failure/{}"
IDLE_WAIT = timedelta(seconds=60)
"""How long a rank waits for a command before it waits again: rollouts may take hours."""
FAILURE_WAIT_S = 10.0
"""How long rank 0 waits for the others' own words after its contact with them broke."""
POLL_S = 0.1
END = "end"
RANK_REMEDY = "fix this, then continue with --resume"
KILLED_REMEDY = "if nobody killed it, look at the machine's memory and the rank's log; continue with --resume"
STUCK_REMEDY = (
    "look at that machine's GPU, memory and network; continue with --resume, or raise `distributed.timeout_s`"
)
OPERATOR_ERRORS = (PolicyError, ModelError, NotFiniteError)


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
        self.ranks, self.names, self._find_ended = ranks, names, find_ended
        self._lock, self._number, self.is_broken = Lock(), 0, False
        self.answers: list[Any] = []
        """What the other ranks answered to the latest command."""

    @contextmanager
    def command(self, name: str, arguments: Mapping[str, Any] | None = None, content: bytes = b"") -> Iterator[None]:
        """Announces a command, whose own part is the block, and waits for the answers of all."""
        with self._lock:
            if self.is_broken:
                raise LostRankError(f"{name!r} was not done: the ranks have lost each other", RANK_REMEDY)
            self._number += 1
            try:
                self._announce(name, arguments or {}, content)
                yield
                self.ranks.report(f"waiting for the answers to {name!r}")
                self.answers = self._collect(name)
            except Exception as error:
                self.is_broken = True
                if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    raise self.explain(name) or error from error
                raise
            except BaseException:
                self.is_broken = True
                raise

    def _announce(self, name: str, arguments: Mapping[str, Any], content: bytes) -> None:
        self.ranks.report(name)
        text = json.dumps({"name": name, "arguments": arguments, "bytes": len(content)})
        self.ranks.store.set(COMMAND_KEY.format(self._number), text)
        if content:
            self.ranks.broadcast_bytes(content, len(content))

    def _collect(self, name: str) -> list[Any]:
        keys = [ANSWER_KEY.format(self._number, rank) for rank in range(1, self.ranks.size)]
        deadline = time.monotonic() + self.ranks.settings.timeout_s
        while not self.ranks.store.check(keys):
            if time.monotonic() > deadline or self._read_failures() or self._find_ended():
                raise self.explain(name) or LostRankError(f"{name!r} was not answered", STUCK_REMEDY)
            time.sleep(POLL_S)
        answers = [json.loads(self.ranks.store.get(key)) for key in keys]
        for key in (COMMAND_KEY.format(self._number), *keys):
            self.ranks.store.delete_key(key)
        return answers

    def explain(self, name: str) -> RankError | None:
        """Why the ranks lost each other during a command: a rank's own error, its end, or that it is stuck."""
        others, deadline = set(range(1, self.ranks.size)), time.monotonic() + FAILURE_WAIT_S
        while True:
            failures, ended = self._read_failures(), self._find_ended()
            if causes := {rank: failure for rank, failure in failures.items() if not failure["lost"]}:
                rank, failure = min(causes.items())
                return RankError(f"{self.names[rank]}: {failure['problem']}", failure["remedy"] or RANK_REMEDY)
            if killed := {rank: how for rank, how in ended.items() if rank not in failures}:
                rank, how = min(killed.items())
                return LostRankError(f"{self.names[rank]} {how} during {name!r}", KILLED_REMEDY)
            silent = others - failures.keys() - ended.keys()
            if time.monotonic() > deadline or not silent:
                break
            time.sleep(POLL_S)
        late = [rank for rank in silent if not self.ranks.store.check([ANSWER_KEY.format(self._number, rank)])]
        if not late:
            return None
        described = "; ".join(f"{self.names[rank]} is late, and was last seen in: {self._stage(rank)}" for rank in late)
        problem = (
            f"the ranks waited for each other in {name!r} for up to {self.ranks.settings.timeout_s:g} s: {described}"
        )
        return LostRankError(problem, STUCK_REMEDY)

    def _read_failures(self) -> dict[int, dict[str, Any]]:
        keys = {rank: FAILURE_KEY.format(rank) for rank in range(1, self.ranks.size)}
        return {
            rank: json.loads(self.ranks.store.get(key)) for rank, key in keys.items() if self.ranks.store.check([key])
        }

    def _stage(self, rank: int) -> str:
        key = STAGE_KEY.format(rank)
        return self.ranks.store.get(key).decode() if self.ranks.store.check([key]) else "its start"


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
            self.ranks.report(f"waiting for a command after {command.name!r}")
            self.ranks.store.set(ANSWER_KEY.format(command.number, self.ranks.rank), json.dumps(answer))
            if command.name == END:
                return

    def fail(self, error: Exception) -> None:
        """Tells rank 0."""
        problem, remedy = str(error), None
        if isinstance(error, PolicyError):
            problem, remedy = error.problem, error.remedy
        elif not isinstance(error, OPERATOR_ERRORS):
            problem = f"{type(error).__name__}: {error}"
        is_lost = isinstance(error, RuntimeError) and not is_out_of_memory(error)
        failure = {"problem": problem, "remedy": remedy, "lost": is_lost and is_connection_error(error)}
        self.ranks.store.set(FAILURE_KEY.format(self.ranks.rank), json.dumps(failure))

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
        content = self.ranks.broadcast_bytes(b"", values["bytes"]) if values["bytes"] else b""
        return Command(self._number, values["name"], values["arguments"], content)


CONNECTION_WORDS = ("gloo", "nccl", "connection", "socket", "timed out", "timeout", "store")


def is_connection_error(error: Exception) -> bool:
    """Whether a collective call failed because of another rank. Torch has no type for it with gloo."""
    return any(word in str(error).lower() for word in CONNECTION_WORDS)
