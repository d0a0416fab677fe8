"""Measures all rows in many short rounds, each row soon after its floor, so that a busy moment affects both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import load_generator
from measured_process import MeasuredProcess
from peers import Peer
from rows import ROWS, Row, echo_command, process_commands, process_env

ORDER_TIMEOUT_S = 180.0
MAX_CALLS = 20_000


@dataclass(frozen=True, slots=True)
class Pace:
    """How long and how often each row is measured."""

    rounds: int
    window_s: float
    concurrencies: tuple[int, int]
    """Few, for the time that a caller waits, and many, of which the ratios are; the latter in every round."""
    few_every: int = 1
    """Rounds between two with few."""


FULL = Pace(rounds=40, window_s=0.3, concurrencies=(1, 64), few_every=5)
QUICK = Pace(rounds=1, window_s=0.1, concurrencies=(1, 8))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of a row."""

    calls: int
    right: int
    wall_s: float
    cpu_s: float
    """Of the measured process alone."""
    tool_cpu_s: float
    """CPU of the tool server, wherever it runs."""
    client_share: float
    """The part of one core that the load generator took; 0 where the caller is the measured process."""


@dataclass(slots=True)
class Measurement:
    """All samples of a row."""

    row: Row
    calls: dict[int, int] = field(default_factory=dict)
    """Calls in one sample, by concurrency."""
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By concurrency."""
    problem: str = ""


class MeasurementSetup:
    """The processes that take part, started once for all rounds."""

    def __init__(self, peer: Peer) -> None:
        self.processes: dict[str, MeasuredProcess] = {}
        peers = {row.process for row in ROWS if row.process.startswith("fastmcp")}
        self.problems = dict.fromkeys(peers, peer.problem) if peer.problem else {}
        self._sessions: dict[str, list[str]] = {}
        self.echo = MeasuredProcess("echo", echo_command(), process_env(""))
        self._commands = process_commands(self.echo.url, peer)

    def start(self, rows: Sequence[Row] = ROWS) -> None:
        """Starts the processes of the rows; those that cannot start are noted in `problems`."""
        env = process_env(self.echo.url)
        for key in sorted({row.process for row in rows} - self.problems.keys()):
            try:
                self.processes[key] = MeasuredProcess(key, self._commands[key], env)
            except RuntimeError as error:
                self.problems[key] = str(error)

    def stop(self) -> None:
        for process in (*self.processes.values(), self.echo):
            process.stop()

    def sample(self, row: Row, calls: int, concurrency: int) -> Sample:
        """Measures a number of calls of one row."""
        process = self.processes[row.process]
        templates = [] if row.interface == "inside" else self._request_templates(row, process, concurrency)
        cpu_before_s, tool_before_s = process.cpu_s, self._tool_cpu_s(row, process)
        if row.interface == "inside":
            answer = process.send_order(ORDER_TIMEOUT_S, way=row.tool, calls=calls, concurrency=concurrency)
            right, wall_s, share, cpu_s = int(answer["right"]), answer["wall_s"], 0.0, answer["cpu_s"]
        else:
            load = load_generator.run_load(process.url, templates, calls)
            right, wall_s, share = load.right, load.wall_s, load.client_cpu_s / load.wall_s
            cpu_s = process.cpu_s - cpu_before_s
        return Sample(calls, right, wall_s, cpu_s, self._tool_cpu_s(row, process) - tool_before_s, share)

    def _request_templates(
        self, row: Row, process: MeasuredProcess, concurrency: int
    ) -> list[load_generator.RequestTemplate]:
        url = process.url.removesuffix("/mcp")
        if row.interface == "mcp":
            return [load_generator.mcp_call(f"{url}/mcp", row.tool)] * concurrency
        if row.interface == "sessions":
            return [load_generator.session_request(url)] * concurrency
        if row.process == "bare":
            return [load_generator.gateway_call(url, "any", row.tool)] * concurrency
        sessions = self._sessions.setdefault(row.process, [])
        while len(sessions) < concurrency:
            sessions.append(load_generator.request_json(url, "POST", "/v1/sessions", {})["id"])
        return [load_generator.gateway_call(url, session, row.tool) for session in sessions[:concurrency]]

    def _tool_cpu_s(self, row: Row, process: MeasuredProcess) -> float:
        if row.behind == "http":
            return self.echo.cpu_s
        return process.children_cpu_s if row.behind == "stdio" else 0.0


def measure_rows(
    setup: MeasurementSetup, pace: Pace, log: Callable[[str], None], rows: Sequence[Row] = ROWS
) -> list[Measurement]:
    """Measures all rows in every round; a row that fails keeps its problem and is skipped from then on."""
    measurements = [Measurement(row, problem=setup.problems.get(row.process, "")) for row in rows]
    place: dict[str, int] = {}
    for number, row in enumerate(ROWS):
        place[row.key] = place[row.floor[-1]] if row.floor else number
    by_floor = sorted(measurements, key=lambda item: place[item.row.key])
    turns = [(item, concurrency) for concurrency in pace.concurrencies for item in by_floor]
    for item, concurrency in turns:
        _note_problems(item, partial(_warm_up, setup, item, concurrency, pace))
    for number in range(pace.rounds):
        began = time.perf_counter()
        for item, concurrency in turns if number % pace.few_every == 0 else turns[len(by_floor) :]:
            _note_problems(item, partial(_add_sample, setup, item, concurrency))
        log(f"round {number + 1} of {pace.rounds}: {time.perf_counter() - began:.0f} s")
    return measurements


def _warm_up(setup: MeasurementSetup, item: Measurement, concurrency: int, pace: Pace) -> None:
    """Determines how many calls fill the window, by the speed after a first sample."""
    setup.sample(item.row, 2 * concurrency, concurrency)
    warm = setup.sample(item.row, 2 * concurrency, concurrency)
    item.calls[concurrency] = max(concurrency, 4, min(MAX_CALLS, int(pace.window_s * warm.calls / warm.wall_s)))


def _add_sample(setup: MeasurementSetup, item: Measurement, concurrency: int) -> None:
    sample = setup.sample(item.row, item.calls[concurrency], concurrency)
    item.samples.setdefault(concurrency, []).append(sample)


def _note_problems(item: Measurement, action: Callable[[], None]) -> None:
    if item.problem:
        return
    try:
        action()
    except (RuntimeError, OSError) as error:  # a peer may fail in its own ways; the table shows how
        item.problem = f"{type(error).__name__}: {error}"[:200]
