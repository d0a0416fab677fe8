"""Runs a trainer that writes a line of JSON for each step, and measures the wall and CPU time of each step."""

from __future__ import annotations

import json
import operator
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryFile
from typing import Any

import psutil

POLL_S = 0.01
"""The interval at which the file is read, and so the error of a step's time."""
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step's time."""

    wall_s: float
    core_s: float
    """CPU of the process and its descendants."""
    metrics: Mapping[str, Any]
    """The line of the step."""


def measure_steps(
    name: str, command: Sequence[str], env: Mapping[str, str], file: Path, timeout_s: float
) -> list[StepCost]:
    """Measures each step but the first, from one line to the next; raises RuntimeError if the trainer fails."""
    with TemporaryFile("w+") as output:
        process = psutil.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            steps = _watch_file(process, file, time.monotonic() + timeout_s)
        finally:
            _stop(process)
        if process.returncode != 0 or len(steps) < 2:
            output.seek(0)
            tail = " | ".join(output.read().strip().splitlines()[-3:])
            raise RuntimeError(f"{name} ended with {process.returncode} after {len(steps)} steps: {tail}")
    return [StepCost(after[0] - before[0], after[1] - before[1], after[2]) for before, after in pairwise(steps)]


def _watch_file(process: psutil.Popen, file: Path, deadline: float) -> list[tuple[float, float, Mapping[str, Any]]]:
    """Time, CPU and content of each line as it appears."""
    steps: list[tuple[float, float, Mapping[str, Any]]] = []
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        if len(lines) > len(steps) and not has_ended:
            now = time.perf_counter(), core_seconds(process)
            steps += [(*now, json.loads(line)) for line in lines[len(steps) :]]
        if has_ended:
            break
        time.sleep(POLL_S)
    return steps


def core_seconds(process: psutil.Process) -> float:
    """CPU of a process and its descendants; that of ended ones counts with the process that waited for them."""
    own = process.cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return float(total)


def _stop(process: psutil.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(psutil.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    if process.poll() is None:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Figures:
    """One trainer's figures: costs as medians over its runs of the mean over their steps, work as means."""

    core_s: float
    core_s_least: float
    core_s_most: float
    wall_s: float
    written_per_s: float
    """Generated tokens per second of rollouts."""
    learned_per_s: float
    """Tokens of whole rollouts, prompts included, per second of the rest of the step."""
    rollouts: float
    written: float
    tokens: float
    turns: float
    calls: float
    reward: float


WORK_FIGURES = ("rollouts", "written", "tokens", "turns", "calls", "reward")


@dataclass(frozen=True, slots=True)
class Work:
    """What one step did, for both trainers."""

    rolling_out_s: float
    rollouts: float
    written: float
    tokens: float
    turns: float
    calls: float
    reward: float


def read_mtrl_step(line: Mapping[str, Any]) -> Work:
    count = line["rollout/count"]
    sums = [count * line[f"rollout/{name}"] for name in ("written", "tokens", "turns", "calls")]
    return Work(line["time/rolling_out_s"], count, *sums, line["reward/mean"])


def read_trl_step(line: Mapping[str, Any]) -> Work:
    return Work(**line)


def compute_figures(runs: Sequence[Sequence[StepCost]], read_step: Callable[[Mapping[str, Any]], Work]) -> Figures:
    work_by_run = [[read_step(step.metrics) for step in run] for run in runs]
    core_s = [mean(step.core_s for step in run) for run in runs]
    rollout_s = [sum(work.rolling_out_s for work in works) for works in work_by_run]
    rest_s = [sum(step.wall_s for step in run) - seconds for run, seconds in zip(runs, rollout_s, strict=True)]
    written = [sum(work.written for work in works) for works in work_by_run]
    tokens = [sum(work.tokens for work in works) for works in work_by_run]
    all_work = [work for works in work_by_run for work in works]
    return Figures(
        core_s=median(core_s),
        core_s_least=min(core_s),
        core_s_most=max(core_s),
        wall_s=median(mean(step.wall_s for step in run) for run in runs),
        written_per_s=median(map(operator.truediv, written, rollout_s)),
        learned_per_s=median(map(operator.truediv, tokens, rest_s)),
        **{name: mean(getattr(work, name) for work in all_work) for name in WORK_FIGURES},
    )
