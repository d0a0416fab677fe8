"""Measures sandboxes: their start beside a bare process, 256 at once, and a warm call of `python` over the pipe.

    .venv/bin/python bench/sandbox.py [--small] [--many] [--out FOLDER]

Each time is taken in turn with its floor: the same command, or the same server of commands, without a sandbox.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.lowlevel
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.process.pipe_process import PipeProcess
from gateway.process.reaper import Reaper
from gateway.sandbox.bubblewrap import Confined, find_problem
from gateway.sandbox.cgroups import find_parent
from gateway.sandbox.provider import INTERPRETER_COMMAND, SERVER_COMMAND, BubblewrapProvider, opened
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_toolset import SandboxToolset
from gateway.sandbox.sandboxed_command import open_command
from mtrl_plugins.demo.shell.machine_root import make_machine_root

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 900
CALL_S, ANSWER_S = 60.0, 120.0
"""What a command has alone, and beside all others: one that hangs is lost, and the others go on."""
MOST_ABOVE_MS = 10.0
MOST_CALL_MS = 2.0


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    starts: int = 60
    at_once: int = 256
    calls: int = 500


STEPS = (
    "`true` alone",
    "a shell outside, which joins the control group and opens files",
    "bubblewrap: namespaces, the file system, the filter of system calls",
    "a shell inside: folders in memory with `mount`, limits",
    "`setpriv`: no rights, another user",
)
"""What a start consists of, each after the one before it."""
REQUEST = {
    "do": "python", "code": "1 + 1", "command": list(INTERPRETER_COMMAND), "timeout_s": CALL_S, "output_bytes": 1000,
}  # fmt: skip
MANY = ("bare servers of commands", "sandboxes", "sandboxes with a root under an overlay")
COLUMNS = {
    "median_s": "median start, s", "last_s": "last start, s", "wall_s": "in all, s", "processes": "processes each",
    "memory_mb": "their memory without the file, MB", "disk_mb": "written to disk, MB each", "lost": "lost",
    "load": "load before",
}  # fmt: skip
WRITE = ("sh", "-c", "head -c 1048576 /dev/zero > file && echo here")
MESSAGE = json.dumps(REQUEST).encode()
SMALL = Sizes(starts=5, at_once=8, calls=10)
Step = Callable[[], Awaitable[object]]
Run = Callable[[], Awaitable[str]]


async def time_in_turn(
    count: int, bare: Step, boxed: Step, ready: Step = anyio.lowlevel.checkpoint
) -> dict[str, float]:
    """Median milliseconds of two steps, taken in turn, so that the machine is equally busy for both.

    Before each turn, `ready` waits for what they need.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        await ready()
        for step, kept in zip((bare, boxed), times, strict=True):
            began = time.perf_counter()
            await step()
            kept.append((time.perf_counter() - began) * 1000)
    floor, value = median(times[0]), median(times[1])
    return {"bare_ms": floor, "sandbox_ms": value, "above_ms": value - floor, "ratio": value / floor}


async def measure_commands(count: int, reaper: Reaper) -> dict[str, float]:
    """A command from its start to its end."""

    async def run_bare() -> None:
        subprocess.run(["true"], check=True, timeout=CALL_S)  # noqa: ASYNC221 - nothing else runs

    async def run_boxed() -> None:
        async with open_command(Confined(("true",), SandboxSettings()), reaper) as held:
            subprocess.run(held.line, check=True, timeout=CALL_S)  # noqa: ASYNC221 - nothing else runs

    times = await time_in_turn(count, run_bare, run_boxed)
    return times | {"cpu_above_ms": await cpu_ms(run_boxed, count) - await cpu_ms(run_bare, count)}


async def measure_steps(count: int, reaper: Reaper) -> dict[str, float]:
    """Median milliseconds of the command line up to each of its steps, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(count):
        async with open_command(Confined(("true",), SandboxSettings()), reaper) as held:
            words = held.line
            *group, inside = [place + 1 for place, word in enumerate(words) if word == "--"][:2]
            outside = group[0] if group else 0  # Without a control group, no shell joins one.
            lines = [(), words[:outside], words[:inside], words[: words.index("setpriv")], words[:-1]]
            for name, line in zip(STEPS, lines, strict=True):
                began = time.perf_counter()
                subprocess.run((*line, "true"), check=True, timeout=CALL_S)  # noqa: ASYNC221 - nothing else runs
                times[name].append((time.perf_counter() - began) * 1000)
    return {name: median(taken) for name, taken in times.items()}


async def cpu_ms(step: Step, count: int) -> float:
    """Milliseconds of processor time of the processes of a step, on average; other programs change it little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(count):
        await step()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000 / count


async def measure_servers(count: int, reaper: Reaper) -> dict[str, float]:
    """The server of commands, which is Python, until it is ready, and its end."""

    async def start_bare() -> None:
        process = PipeProcess.start(SERVER_COMMAND)
        await process.receive()
        await process.kill()

    async def start_boxed() -> None:
        async with opened(BubblewrapProvider(reaper), SandboxSettings()):
            pass

    return await time_in_turn(count, start_bare, start_boxed)


async def measure_calls(count: int, reaper: Reaper) -> dict[str, float]:
    """A call of Python in an interpreter that has been called before."""
    bare = PipeProcess.start(SERVER_COMMAND)
    await bare.receive()

    async def call_bare() -> None:
        await bare.ask(MESSAGE)

    async with opened(BubblewrapProvider(reaper), SandboxSettings()) as sandbox:
        await call_bare()
        await sandbox.run_python("1 + 1", CALL_S)
        times = await time_in_turn(count, call_bare, lambda: sandbox.run_python("1 + 1", CALL_S))
    await bare.kill()
    return times


async def measure_spares(count: int, reaper: Reaper) -> dict[str, float]:
    """A first call of Python in a sandbox that was started in advance (`warm`), and the end of that sandbox."""
    toolset = SandboxToolset(("python",), SandboxSettings(), BubblewrapProvider(reaper))
    toolset.warm = 1

    async def wait_for_spare() -> None:
        while toolset.spares is None or not toolset.spares.ready:  # noqa: ASYNC110 - a spare has no event
            await anyio.sleep(0.01)

    async def call_bare() -> None:
        process = PipeProcess.start(SERVER_COMMAND)
        await process.receive()
        await process.ask(MESSAGE)
        await process.kill()

    async def call_spare() -> None:
        sandbox = await toolset.take("")
        await sandbox.run_python("1 + 1", CALL_S)
        await sandbox.stop()

    async with toolset:
        return await time_in_turn(count, call_bare, call_spare, wait_for_spare)


async def measure_many(count: int, reaper: Reaper) -> dict[str, dict[str, float]]:
    """Many at once that each write a file: bare servers of commands, sandboxes, and sandboxes with a root."""
    provider, boxes = BubblewrapProvider(reaper), [SandboxSettings(), SandboxSettings(root=make_machine_root())]

    @asynccontextmanager
    async def open_box(settings: SandboxSettings) -> AsyncIterator[Run]:
        async with opened(provider, settings) as sandbox:

            async def run() -> str:
                return (await sandbox.run(WRITE, b"", ANSWER_S)).stdout

            yield run

    found = [
        await measure_at_once(count, open_bare),
        *[await measure_at_once(count, partial(open_box, box)) for box in boxes],
    ]
    return dict(zip(MANY, found, strict=True))


@asynccontextmanager
async def open_bare() -> AsyncIterator[Run]:
    """A server of commands that nothing confines, in a folder of its own on the disk."""
    process = PipeProcess.start(SERVER_COMMAND)
    await process.receive()
    with TemporaryDirectory() as folder:

        async def run() -> str:
            command = ("sh", "-c", 'cd "$1" && exec sh -c "$2"', "sh", folder, WRITE[-1])
            request = {"do": "run", "command": command, "stdin": "", "env": {}, "keeps_end": False}
            reply = await process.ask(json.dumps({**REQUEST, **request}).encode())
            return str(json.loads(reply)["stdout"])

        yield run
        await process.kill()


async def measure_at_once(count: int, start: Callable[[], AbstractAsyncContextManager[Run]]) -> dict[str, float]:
    """Starts, memory and disk of what all runs at once; lost are those that failed, or answered something else."""
    waits, answered, lost = list[float](), list[str](), list[Exception]()
    load, all_ended, measured = os.getloadavg()[0], anyio.Event(), anyio.Event()
    began, before = time.perf_counter(), count_use()

    def end(ended: list[Any], what: object) -> None:
        ended.append(what)
        if len(answered) + len(lost) >= count:
            all_ended.set()

    async def run_one() -> None:
        try:
            async with start() as run:
                waits.append(time.perf_counter() - began)
                with anyio.fail_after(ANSWER_S):
                    answer = await run()
                if answer != "here\n":
                    raise ValueError(f"it answered {answer!r:.200}")
                end(answered, answer)
                await measured.wait()
        except Exception as error:  # boundary: one that is lost is counted, and the others go on
            print(f"lost: {error!r}", file=sys.stderr)
            end(lost, error)

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(run_one)
        await all_ended.wait()
        use = [(now - then) / count for now, then in zip(count_use(), before, strict=True)]
        measured.set()
    wall_s = time.perf_counter() - began
    return {
        "count": count, "lost": len(lost), "median_s": median(waits or [nan]), "last_s": max(waits, default=nan),
        "wall_s": wall_s, "processes": use[0], "memory_mb": use[1] / 2**20, "disk_mb": use[2] / 2**20, "load": load,
    }  # fmt: skip


def count_use() -> tuple[int, int, int]:
    """The processes below this one, their memory (what they share is divided among them), and bytes written to disk."""
    below = psutil.Process().children(recursive=True)
    memory = sum(process.memory_full_info().pss for process in below)
    return len(below), memory, sum(process.io_counters().write_bytes for process in below)


def list_promises(results: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The promises, with what was measured."""
    above, call, many = results["commands"]["above_ms"], results["calls"]["sandbox_ms"], results["many"]
    lost = sum(row["lost"] for row in many.values())
    return [
        ("a start costs at most 10 ms more than a bare process", f"{above:.1f} ms", above <= MOST_ABOVE_MS),
        ("a warm call of `python` takes at most 2 ms over the pipe", f"{call:.2f} ms", call <= MOST_CALL_MS),
        (f"{many[MANY[1]]['count']:.0f} sandboxes at once, none lost", str(lost), lost == 0),
    ]


def format_report(results: dict[str, Any]) -> str:
    """The page with the results."""
    names = {
        "commands": "`true`, from its start to its end",
        "servers": "the server of commands (Python), until it is ready, and its end",
        "spares": "a first call of `python` in a sandbox started in advance (`warm`), and its end",
        "calls": "a warm call of `python`",
    }
    promises = [
        f"| {text} | {value} | {'met' if kept else '**missed**'} |" for text, value, kept in results["promises"]
    ]
    rows = [
        f"| {text} | {row['bare_ms']:.2f} | {row['sandbox_ms']:.2f} | {row['above_ms']:.2f} | {row['ratio']:.1f} |"
        for name, text in names.items()
        if (row := results[name])
    ]
    many = results["many"]
    return "\n".join(
        [
            "# Sandboxes",
            "",
            f"`make bench-sandbox`, measured on {results['machine']}. The load was {results['load']:.1f} at the start: "
            "where that is more than a few tenths, other programs shared the cores, and ratios say more than times.",
            "",
            "| Promise | Measured | |",
            "|---|---|---|",
            *promises,
            "",
            "Medians in milliseconds, each taken in turn with its floor, the same without a sandbox:",
            "",
            "| What | bare | in a sandbox | above | ratio |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Where the time of a start goes, in milliseconds:",
            "",
            "| Step | takes |",
            "|---|---|",
            *format_steps(results),
            "",
            f"A start takes {results['commands']['cpu_above_ms']:.1f} ms of processor time more than a bare process.",
            "",
            f"{many[MANY[1]]['count']:.0f} at once, {results['many_groups']}, each with a file of 1 MB that it wrote. "
            "What is written over a root is in memory, as `/rollout` is:",
            "",
            f"| At once | {' | '.join(COLUMNS.values())} |",
            "|---|" + "--:|" * len(COLUMNS),
            *(f"| {name} | {' | '.join(f'{row[column]:.3g}' for column in COLUMNS)} |" for name, row in many.items()),
            "",
        ]
    )


def format_steps(results: dict[str, Any]) -> list[str]:
    """The rows of the table of steps: what each adds to the one before it."""
    taken = list(results["steps"].values())
    added = [value - before for before, value in zip([0.0, *taken[:-1]], taken, strict=True)]
    groups = results["commands"]["sandbox_ms"] - taken[-1]
    rows = [*zip(STEPS, added, strict=True), ("control groups and files are made before, and removed after", groups)]
    return [f"| {name} | {value:.2f} |" for name, value in rows]


async def measure(sizes: Sizes, kept: Mapping[str, Any]) -> dict[str, Any]:
    """All measurements but those that are kept."""
    if (problem := find_problem()) is not None:
        sys.exit(problem)
    groups = "control groups" if find_parent() else "no control groups"
    reaper = Reaper()
    with anyio.fail_after(TIMEOUT_S):
        results: dict[str, Any] = dict(kept) or {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {groups}",
            "load": os.getloadavg()[0],
            "commands": await measure_commands(sizes.starts, reaper),
            "steps": await measure_steps(sizes.starts, reaper),
            "servers": await measure_servers(sizes.starts, reaper),
            "spares": await measure_spares(sizes.starts, reaper),
            "calls": await measure_calls(sizes.calls, reaper),
        }
        results |= {"many": await measure_many(sizes.at_once, reaper), "many_groups": groups}
        await reaper.stop()
    return results | {"promises": list_promises(results)}


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a quick run, whose times mean little")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where sandbox.json and sandbox.md go")
    parser.add_argument("--many", action="store_true", help="only what runs at once; the other results stay")
    options = parser.parse_args()
    kept = json.loads((options.out / "sandbox.json").read_text()) if options.many else {}
    results = anyio.run(measure, SMALL if options.small else Sizes(), kept)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sandbox.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "sandbox.md").write_text(format_report(results))
    print(format_report(results))


if __name__ == "__main__":
    main()
