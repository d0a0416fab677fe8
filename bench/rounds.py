"""Rows are measured in turns, round by round, so that a busy moment of the machine falls on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import load
from peers import Peer
from process import Measured
from rows import ROWS, Row, commands, echo_command, environment

PATIENCE_S = 180.0
MOST_CALLS = 20_000


@dataclass(frozen=True, slots=True)
class Pace:
    """How long and how often each row is measured."""

    rounds: int
    window_s: float
    concurrencies: tuple[int, ...]


FULL = Pace(rounds=5, window_s=1.2, concurrencies=(1, 64))
QUICK = Pace(rounds=1, window_s=0.1, concurrencies=(1, 8))


@dataclass(frozen=True, slots=True)
class Sample:
    calls: int
    right: int
    wall_s: float
    cpu_s: float
    """Of the measured process alone."""
    behind_s: float
    """CPU of the tool server behind it, wherever that runs."""
    client_share: float
    """How much of one core the load itself took; 0 where the caller is the measured process."""


@dataclass(slots=True)
class Measurement:
    row: Row
    calls: dict[int, int] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """Both by concurrency."""
    problem: str = ""


class Stage:
    """Everything that takes part; started once, and kept for all rounds."""

    def __init__(self, peer: Peer) -> None:
        self.processes: dict[str, Measured] = {}
        self.problems = {"fastmcp-stdio": peer.problem, "fastmcp-http": peer.problem} if peer.problem else {}
        self._sessions: dict[str, list[str]] = {}
        self.echo = Measured("echo", echo_command(), environment(""))
        self._commands = commands(self.echo.url, peer)

    def start(self, rows: Sequence[Row] = ROWS) -> None:
        env = environment(self.echo.url)
        for key in sorted({row.process for row in rows} - self.problems.keys()):
            try:
                self.processes[key] = Measured(key, self._commands[key], env)
            except RuntimeError as error:
                self.problems[key] = str(error)

    def end(self) -> None:
        for process in (*self.processes.values(), self.echo):
            process.end()

    def sample(self, row: Row, calls: int, concurrency: int) -> Sample:
        process = self.processes[row.process]
        speakers = [] if row.door == "inside" else self._speakers(row, process, concurrency)
        cpu_s, behind_s = process.cpu_s, self._behind_s(row, process)
        if row.door == "inside":
            told = process.ordered(PATIENCE_S, way=row.tool, calls=calls, concurrency=concurrency)
            right, wall_s, share, cpu_s = int(told["right"]), told["wall_s"], 0.0, told["cpu_s"]
        else:
            fired = load.fire(process.url, speakers, calls)
            right, wall_s, share = fired.right, fired.wall_s, fired.client_s / fired.wall_s
            cpu_s = process.cpu_s - cpu_s
        return Sample(calls, right, wall_s, cpu_s, self._behind_s(row, process) - behind_s, share)

    def _speakers(self, row: Row, process: Measured, concurrency: int) -> list[load.Speaker]:
        url = process.url.removesuffix("/mcp")
        if row.door == "mcp":
            return [load.mcp(f"{url}/mcp", row.tool)] * concurrency
        sessions = self._sessions.setdefault(row.process, [])
        while len(sessions) < concurrency:
            sessions.append(load.ask(url, "POST", "/v1/sessions", {})["id"])
        return [load.ours(url, session, row.tool) for session in sessions[:concurrency]]

    def _behind_s(self, row: Row, process: Measured) -> float:
        if row.behind == "http":
            return self.echo.cpu_s
        return process.children_s if row.behind == "stdio" else 0.0


def measured(stage: Stage, pace: Pace, say: Callable[[str], None], rows: Sequence[Row] = ROWS) -> list[Measurement]:
    """All rows, in turns; a row that fails keeps its reason and is left out of the turns that remain."""
    found = [Measurement(row, problem=stage.problems.get(row.process, "")) for row in rows]
    turns = [(one, concurrency) for concurrency in pace.concurrencies for one in found]
    for one, concurrency in turns:
        _guarded(one, partial(_warm, stage, one, concurrency, pace))
    for number in range(pace.rounds):
        began = time.perf_counter()
        for one, concurrency in turns:
            _guarded(one, partial(_turn, stage, one, concurrency))
        say(f"round {number + 1} of {pace.rounds}: {time.perf_counter() - began:.0f} s")
    return found


def _warm(stage: Stage, one: Measurement, concurrency: int, pace: Pace) -> None:
    """Finds how many calls fill the window, by the speed of a warm row."""
    stage.sample(one.row, 2 * concurrency, concurrency)
    warm = stage.sample(one.row, 2 * concurrency, concurrency)
    one.calls[concurrency] = max(concurrency, 4, min(MOST_CALLS, int(pace.window_s * warm.calls / warm.wall_s)))


def _turn(stage: Stage, one: Measurement, concurrency: int) -> None:
    sample = stage.sample(one.row, one.calls[concurrency], concurrency)
    one.samples.setdefault(concurrency, []).append(sample)


def _guarded(one: Measurement, act: Callable[[], None]) -> None:
    if one.problem:
        return
    try:
        act()
    except (RuntimeError, OSError) as error:  # a peer may break in its own ways; the table says how
        one.problem = f"{type(error).__name__}: {error}"[:200]
