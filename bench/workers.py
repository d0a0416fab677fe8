"""Rollout workers: turns per second, processor time per turn, and memory per rollout, against none.

python bench/workers.py            # 0, 1, 2, 4 workers; 1,000 and 10,000 rollouts; writes bench/results/workers.md
python bench/workers.py --small    # smoke test; writes nothing without --out

The engine is scripted and answers at once, and so does the tool, so that only the loop and the messages are measured. A
turn's processor time is that of the training process and of all workers together; the training process's part is what
bounds the number of workers. Memory is measured while every rollout waits in its second turn. All numbers of workers
take turns for some rounds, and the best round of each counts: what else a machine does only ever adds to a cost.

Three processes that compute all the time need three cores. Where there are fewer, scaling is measured with an engine
that takes a second for each turn, as a real one does, and as many rollouts for each worker: turns/s should grow with
the workers.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402
import anyio.lowlevel  # noqa: E402
import psutil  # noqa: E402

from mtrl_plugins.workers.settings import WorkerSettings  # noqa: E402
from mtrl_plugins.workers.worker_job import make_worker_job  # noqa: E402
from mtrl_plugins.workers.worker_pool import WorkerPool  # noqa: E402
from tests.plugins.workers.pools import find_workers  # noqa: E402
from tests.trainer.policy_scripts import HERMES, encode_turns, make_tasks, render_calls  # noqa: E402
from tests.trainer.tokenizer_families import save_tokenizer_folder  # noqa: E402
from trainer.engine.base import Generation, Sampling  # noqa: E402
from trainer.engine.scripted import DEFAULT_LOGPROB, ScriptedEngine  # noqa: E402
from trainer.rollout.admission import Admission  # noqa: E402
from trainer.rollout.loop import RolloutRunner  # noqa: E402
from trainer.rollout.scheduler import Scheduler  # noqa: E402
from trainer.rollout.settings import BaseRolloutSettings, ConcurrencySettings, RolloutLimits  # noqa: E402
from trainer.setup import load_template, make_gateway  # noqa: E402
from trainer.template import Template  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "workers.md"
TOOL = 'def work(text: str) -> str:\n    """Works."""\n    return text\n'
TURN = "Some thoughts on it.\n" + render_calls(("work", {"text": "It is done; go on."}))
MIN_SCALING, MAX_FLATNESS, MAX_COST = 0.9, 1.2, 1.2
WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    workers: tuple[int, ...] = (0, 1, 2)
    rollouts: int = 512
    turns: int = 20
    under_way: tuple[int, ...] = (1000, 10_000)
    paced: tuple[int, ...] = (1, 2, 4)
    """Workers with the engine that takes its time."""
    paced_rollouts: int = 64
    """Rollouts under way for each of these workers."""
    pace_s: float = 1.0
    rounds: int = 3


SMALL = Size(workers=(0, 1), rollouts=8, turns=3, under_way=(16,), paced=(1,), paced_rollouts=4, pace_s=0.05, rounds=1)


class BenchEngine(ScriptedEngine):
    """Answers every request alike, and remembers none; requests beyond the first turn may have to wait."""

    def __init__(self, template: Template) -> None:
        super().__init__(lambda ids, sampling, key: ())
        (turn,) = encode_turns(template, TURN)
        self._generation = Generation(turn, (DEFAULT_LOGPROB,) * len(turn), "stop")
        self._first_length = 0
        self.turns = self.waiting = 0
        self.gate: anyio.Event | None = None
        self.pace_s = 0.0

    async def generate(self, ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
        self._first_length = self._first_length or len(ids)
        if self.gate is not None and len(ids) > self._first_length + 1:
            self.waiting += 1
            await self.gate.wait()
            self.waiting -= 1
        self.turns += 1
        await anyio.sleep(self.pace_s)
        return self._generation


@dataclass(frozen=True, slots=True)
class Pace:
    """What turns cost with some workers."""

    workers: int
    turns_per_s: float
    trainer_ms: float
    """Processor time of the training process for one turn."""
    worker_ms: float
    """That of the workers."""

    def best(self, other: Pace) -> Pace:
        """The better of two rounds, by each quantity."""
        return Pace(
            self.workers,
            max(self.turns_per_s, other.turns_per_s),
            min(self.trainer_ms, other.trainer_ms),
            min(self.worker_ms, other.worker_ms),
        )


@dataclass
class Measured:
    """All results."""

    paces: list[Pace] = field(default_factory=list)
    paced: list[Pace] = field(default_factory=list)
    """With the engine that takes its time."""
    kib: dict[tuple[int, int], float] = field(default_factory=dict)
    """Memory of one rollout by the number of workers and of rollouts under way."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A runner to measure, and its engine."""

    runner: RolloutRunner
    engine: BenchEngine
    processes: tuple[psutil.Process, ...]
    """The workers."""

    async def run(self, rollouts: int) -> None:
        admission = Admission(ConcurrencySettings(inflight_rollouts=rollouts, running_requests=rollouts))
        tasks = (make_tasks(f"t{number}")[0] for number in range(rollouts))
        async with Scheduler(self.runner, 1, admission=admission).submit(tasks) as groups:
            async for group in groups:
                assert group.rollouts, [failed.reason for failed in group.failed]

    def memory(self) -> int:
        return sum(process.memory_info().rss for process in (psutil.Process(), *self.processes))


@asynccontextmanager
async def open_bench(folder: Path, workers: int, turns: int) -> AsyncIterator[Bench]:
    limits = RolloutLimits(assistant_turns=turns, tool_calls=turns, rollout_tokens=10**6, timeout_s=WAIT_S)
    settings = BaseRolloutSettings(tools=str(folder / "tools"), limits=limits)
    template = load_template(folder / "model", settings.template)
    engine, gateway = BenchEngine(template), make_gateway(settings)
    runner = RolloutRunner(engine, template, gateway, limits)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(gateway)
        if workers:
            chosen = WorkerSettings(workers=workers)
            job = make_worker_job(settings, folder / "model", template, engine, chosen.heartbeat_timeout_s)
            pool = await stack.enter_async_context(WorkerPool(chosen, job, engine, folder, print))
            runner = pool.wrap(runner)
        yield Bench(runner, engine, tuple(find_workers()) if workers else ())


async def measure(size: Size, folder: Path) -> Measured:
    """Measures each number of workers in a pool of its own."""
    write_job(folder)
    paces = dict[int, list[Pace]]()
    paced = dict[int, list[Pace]]()
    for _ in range(size.rounds):
        for workers in size.workers:
            async with open_bench(folder, workers, size.turns) as bench:
                paces.setdefault(workers, []).append(await measure_pace(bench, workers, size.rollouts))
        for workers in size.paced:
            async with open_bench(folder, workers, size.turns) as bench:
                await bench.run(4 * workers)
                bench.engine.pace_s = size.pace_s
                pace = await measure_pace(bench, workers, size.paced_rollouts * workers)
                paced.setdefault(workers, []).append(pace)
    measured = Measured(*([reduce(Pace.best, rounds) for rounds in each.values()] for each in (paces, paced)))
    for workers in (count for count in size.workers if count <= 1):
        for count in size.under_way:
            async with open_bench(folder, workers, 2) as bench:
                measured.kib[workers, count] = await measure_memory(bench, count)
    return measured


def write_job(folder: Path) -> None:
    """Writes the tool and a model without weights."""
    (folder / "tools").mkdir()
    (folder / "tools/job.py").write_text(TOOL)
    (folder / "tools/tools.yaml").write_text("tools: [{function: job:work, at_once: 4096, queue_limit: 20000}]\n")
    (folder / "model").mkdir()
    save_tokenizer_folder(HERMES, folder / "model")


async def measure_pace(bench: Bench, workers: int, rollouts: int) -> Pace:
    await bench.run(max(4, rollouts // 16))  # Warms caches up.
    turns, wall, own = bench.engine.turns, time.perf_counter(), time.process_time()
    others = sum(map(cpu_s, bench.processes))
    await bench.run(rollouts)
    turns, wall_s = bench.engine.turns - turns, time.perf_counter() - wall
    own_s, others_s = time.process_time() - own, sum(map(cpu_s, bench.processes)) - others
    return Pace(workers, turns / wall_s, 1000 * own_s / turns, 1000 * others_s / turns)


async def measure_memory(bench: Bench, count: int) -> float:
    """KiB of one rollout, in all processes together, while `count` of them wait in their second turn."""
    await bench.run(4)
    before, bench.engine.gate = bench.memory(), anyio.Event()
    async with anyio.create_task_group() as running:
        running.start_soon(bench.run, count)
        with anyio.fail_after(WAIT_S):
            while bench.engine.waiting < count:  # noqa: ASYNC110 - the last one to wait tells nobody
                await anyio.sleep(0.05)
        used = bench.memory() - before
        bench.engine.gate.set()
    return used / 1024 / count


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def format_results(measured: Measured, size: Size) -> str:
    """The tables, and whether the promises are kept."""
    lines = [
        "# Rollout workers",
        "",
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; load"
        f" {os.getloadavg()[0]:.1f} at the end; {size.rollouts} rollouts of {size.turns} turns under way at once;"
        f" the best of {size.rounds} rounds",
        "",
        *format_paces(measured.paces),
        "",
        f"{size.paced_rollouts} rollouts for each worker, with an engine that takes {size.pace_s:g} s for a turn:",
        "",
        *format_paces(measured.paced),
    ]
    lines += ["", "| workers | rollouts under way | KiB per rollout |", "|--:|--:|--:|"]
    lines += [f"| {workers} | {count:,} | {kib:,.0f} |" for (workers, count), kib in measured.kib.items()]
    lines += ["", "| promise | measured | |", "|---|--:|---|"]
    for text, value, is_kept in check_promises(measured, size):
        lines.append(f"| {text} | {value} | {'met' if is_kept else 'not met'} |")
    return "\n".join(lines) + "\n"


def format_paces(paces: Sequence[Pace]) -> list[str]:
    """A table of what turns cost."""
    lines = ["| workers | turns/s | CPU ms per turn | of it the training process |", "|--:|--:|--:|--:|"]
    for pace in paces:
        both = pace.trainer_ms + pace.worker_ms
        lines.append(f"| {pace.workers} | {pace.turns_per_s:,.0f} | {both:.2f} | {pace.trainer_ms:.2f} |")
    return lines


def check_promises(measured: Measured, size: Size) -> list[tuple[str, str, bool]]:
    """Scaling until the cores end, one of which the training process needs; and flat memory."""
    promises = [
        *check_scaling("an engine without pause", measured.paces, most=(os.cpu_count() or 1) - 1),
        *check_scaling("the engine that takes its time", measured.paced, most=max(size.paced)),
    ]
    few, many = min(size.under_way), max(size.under_way)
    for workers in sorted({workers for workers, _ in measured.kib}):
        ratio = measured.kib[workers, many] / max(1e-9, measured.kib[workers, few])
        text = f"{workers} workers: a rollout of {many:,} needs at most {MAX_FLATNESS} x the memory of one of {few:,}"
        promises.append((text, f"{ratio:.2f}", ratio <= MAX_FLATNESS))
    return promises


def check_scaling(kind: str, paces: Sequence[Pace], most: int) -> Iterator[tuple[str, str, bool]]:
    """Turns per second grow with up to `most` workers, and a turn costs no more."""
    one = next(pace for pace in paces if pace.workers == 1)
    for pace in paces:
        count, name = pace.workers, f"{pace.workers} workers, {kind}"
        if 1 < count <= most:
            ratio = pace.turns_per_s / one.turns_per_s / count
            yield f"{name}: at least {MIN_SCALING} x {count} turns/s of one", f"{ratio:.2f}", ratio >= MIN_SCALING
        if count > 1:
            cost = (pace.trainer_ms + pace.worker_ms) / (one.trainer_ms + one.worker_ms)
            yield f"{name}: at most {MAX_COST} x the CPU per turn of one", f"{cost:.2f}", cost <= MAX_COST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a smoke test")
    parser.add_argument("--out", type=Path, help="where the tables are written")
    options = parser.parse_args()
    size = SMALL if options.small else Size()
    with TemporaryDirectory(prefix="mtrl-workers-") as folder:
        measured = anyio.run(partial(measure, size, Path(folder)))
    text = format_results(measured, size)
    print(text)
    out = options.out or (None if options.small else RESULTS)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
