"""A thread in each rank that notices what the rank's other threads cannot: that it waits too long, or is alone.

A thread that waits in a collective call cannot be interrupted, and NCCL's own timeout aborts the process without a
word. So this thread says what happened, and ends the process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread, get_ident
from types import FrameType

import torch
from torch._C._distributed_c10d import Store

BEAT_KEY = "beat/{}"
BEAT_S = 1.0
TICK_S = 0.25
END_S = 2.0
"""How long the threads may take to end: the store may be lost, and not answer."""
LONGEST_TICK_S = 2.0
"""Of a longer pause between two ticks, so much counts: this process was stopped too, and nobody was late meanwhile."""
TORCH = str(Path(torch.__file__).parent)
COLLECTIVES = str(Path(torch.distributed.__file__).parent)
Look = Callable[[], Callable[[], None] | None]
"""Returns what ends the process, if something is wrong."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a rank does, within which all ranks wait for each other."""

    name: str
    limit_s: float
    began_s: float
    thread: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is in the code."""

    text: str
    is_collective: bool
    """Whether it waits in torch.distributed, and so for other ranks."""


class Watchdog:
    """The clock, the stage and the heartbeats of a rank, and the thread that watches them."""

    def __init__(self, store: Store, rank: int) -> None:
        """`store` is a connection of its own: other connections may be occupied by a wait."""
        self.now_s = 0.0
        """A clock that stands while this process is stopped."""
        self.stage: Stage | None = None
        self._store, self._rank, self._done = store, rank, Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        store.set(BEAT_KEY.format(rank), "0")

    @contextmanager
    def watching(self, ranks: Sequence[int], look: Look) -> Iterator[None]:
        """Listens to the heartbeats of these ranks, and looks what is wrong, until the context is left."""
        self._seen = dict.fromkeys(ranks, (b"", self.now_s))
        works = {"watchdog": partial(self._watch, look), "heartbeat": partial(self._beat, ranks)}
        threads = [Thread(target=work, name=name, daemon=True) for name, work in works.items()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            for thread in threads:  # One that is asking the store while the interpreter ends would abort the process.
                thread.join(END_S)

    def begin_stage(self, name: str, limit_s: float) -> None:
        """The calling thread does this from now on."""
        self.stage = Stage(name, limit_s, self.now_s, get_ident())

    def end_stage(self) -> None:
        """Nothing is under way that other ranks wait for."""
        self.stage = None

    def find_late_stage(self) -> Stage | None:
        """The stage, if it lasts longer than it may."""
        stage = self.stage
        return stage if stage is not None and self.now_s - stage.began_s > stage.limit_s else None

    def find_silent(self, after_s: float) -> Mapping[int, float]:
        """The ranks that have shown no sign of life for so long, and for how many seconds."""
        silent = {rank: self.now_s - since_s for rank, (_, since_s) in self._seen.items()}
        return {rank: silent_s for rank, silent_s in silent.items() if silent_s > after_s}

    def _watch(self, look: Look) -> None:
        before = time.monotonic()
        while not self._done.wait(TICK_S):
            now = time.monotonic()
            self.now_s += min(now - before, LONGEST_TICK_S)
            before = now
            if end := look():
                end()
                return

    def _beat(self, ranks: Sequence[int]) -> None:
        """Beats, and listens. A store that does not answer is as good as ranks that do not beat."""
        count = 0
        while not self._done.wait(BEAT_S):
            count += 1
            try:
                self._store.set(BEAT_KEY.format(self._rank), str(count))
                beats = self._store.multi_get([BEAT_KEY.format(rank) for rank in ranks])
            except RuntimeError:  # The store is lost: whoever uses it next says so.
                return
            for rank, beat in zip(ranks, beats, strict=True):
                if beat != self._seen[rank][0]:
                    self._seen[rank] = beat, self.now_s


def find_place(thread: int) -> Place:
    """Where a thread is: its innermost line outside of torch."""
    frame: FrameType | None = sys._current_frames().get(thread)
    is_collective = False
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        is_collective |= frame.f_code.co_filename.startswith(COLLECTIVES)
        frame = frame.f_back
    if frame is None:
        return Place("an unknown place", is_collective)
    file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return Place(f"{file}:{frame.f_lineno} ({frame.f_code.co_name})", is_collective)
