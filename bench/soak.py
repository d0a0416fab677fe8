"""Runs the gateway and the trainer for a long time, kills servers at random, and checks that nothing grows.

python bench/soak.py            # an hour or so; writes bench/results/soak.{json,md}
python bench/soak.py --only boxes   # one load; the others' results stay
python bench/soak.py --small    # a minute; writes nothing without --out

Each load runs in a process of its own, which samples its memory, descriptors, threads and children. After the warm-up
none may grow by more than its noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import linear_regression, mean
from threading import Event, Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402
import psutil  # noqa: E402

RESULTS = ROOT / "bench" / "results"
SAMPLES = 120
"""How many samples a load has."""
WARM_UP = 0.3
"""The share of the samples that is left out."""
KILLS, PIECES_PER_KILL = 20, 500
"""Servers that are killed during a load, and the least work between two kills: a server that dies again soon after its
start is restarted with growing delays."""
CONCURRENCY = 8
STEP_TIMEOUT_S = 7200.0
ALLOWED: Mapping[str, float] = {"memory": 0.05, "descriptors": 4, "threads": 4, "children": 2, "left": 0}
"""The growth from the warm-up to the end that is noise: a share of the memory, or a number."""
SERVER = {"command": sys.executable, "args": [str(ROOT / "tool_configs" / "servers" / "calculator.py")]}
CALCULATION = {"expression": "6 * 7"}
PLAIN_SERVER = {"command": sys.executable, "args": [str(ROOT / "bench" / "servers" / "plain_stdio.py")]}
"""Starts in milliseconds: an SDK's import in each of 10,000 processes would take hours and show nothing more."""
PRODUCT = {"a": 6, "b": 7}
BOXES = """tools:
  - sandbox_tools: [shell]
    timeout_s: 120
    sandbox: {root: '%s', memory_mb: 256, remote: {url: '%s'}}
    grade: {command: [sh, -c, cat /rollout/a > /logs/verifier/reward.txt], artifacts: [/rollout/a], timeout_s: 60}
"""
BOX_WORDS, SERVER_WORDS = ("/.mtrl/loader",), ("calculator.py", "plain_stdio.py")
"""How processes that are killed are known by their command lines."""
PIECES_PER_BOX_KILL, CANCELLED_EACH, CANCEL_S, END_S = 50, 10, 0.5, 10.0
"""One session of so many is cancelled in a call, after this time; and how long boxes of cancelled ones have to end."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Load:
    """A load with its size, in calls, sessions or steps."""

    title: str
    unit: str
    count: int
    small: int
    run: Callable[[int, Sampler], Any]


@dataclass
class Sampler:
    """Counts what is done, and samples this process, and the servers of sandboxes that it has started."""

    total: int
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, float]] = field(default_factory=list)
    processes: list[psutil.Process] = field(default_factory=lambda: [psutil.Process()])

    def count(self, outcome: str = "ok") -> None:
        """Counts a piece of work that has ended."""
        self.done += 1
        self.outcomes[outcome] += 1

    def sample(self) -> None:
        """Keeps what there is now."""
        self.samples.append(self.look())

    def look(self) -> dict[str, float]:
        """What there is now."""
        all = self.processes
        return {
            "memory": sum(process.memory_info().rss for process in all) / 2**20,
            "descriptors": sum(process.num_fds() for process in all),
            "threads": sum(process.num_threads() for process in all),
            "children": sum(len(process.children()) for process in all),
            "left": self._count_left(),
        }

    def _count_left(self) -> int:
        """Files in the folder for temporary ones, mounts, and control groups of sandboxes."""
        from gateway.sandbox.cgroups import PREFIX, find_parent

        files, mounts = Path(tempfile.gettempdir()).iterdir(), Path("/proc/self/mountinfo").read_text()
        groups = [file for one in self.processes for file in (find_parent() or Path()).glob(f"{PREFIX}{one.pid}-*")]
        return len([*files, *mounts.splitlines(), *groups])


@contextmanager
def open_files(servers: Mapping[str, Any], tools: str) -> Iterator[tuple[Path, Path]]:
    """A folder of tool files, and the file of servers beside it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tools").mkdir()
        (folder / "tools" / "tools.yaml").write_text(tools)
        (folder / "tools" / "own.py").write_text('def add(a: int, b: int) -> int:\n    """Adds."""\n    return a + b\n')
        (folder / "mcp_servers.json").write_text(json.dumps({"mcpServers": servers}))
        yield folder / "tools", folder / "mcp_servers.json"


async def call_natively(count: int, sampler: Sampler) -> None:
    """Calls a Python function, a thousand times in a session."""
    with open_files({}, "tools: [{function: 'own:add'}]\n") as files:
        await _call_in_sessions(files, "add", {"a": 1, "b": 2}, count, sampler, calls_per_session=1000)


async def call_pooled(count: int, sampler: Sampler) -> None:
    """Calls a stdio server that all sessions share, and kills it at times."""
    with open_files({"calculator": SERVER}, "tools: []\n") as files, killing(sampler):
        await _call_in_sessions(files, "calculate", CALCULATION, count, sampler, calls_per_session=100)


async def open_processes(count: int, sampler: Sampler) -> None:
    """Opens sessions with a server process each, and kills one at times."""
    with open_files({"plain": PLAIN_SERVER | {"isolation": "process"}}, "tools: []\n") as files, killing(sampler):
        await _call_in_sessions(files, "calculate", PRODUCT, count, sampler, calls_per_session=1)


async def start_boxes(count: int, sampler: Sampler) -> None:
    """Plays sessions in boxes with a root, each on the less loaded of two servers, and grades them. Some are cancelled
    in a call, and some processes of boxes are killed."""
    from gateway import Gateway, Task, ToolCall
    from gateway.errors import Unavailable
    from gateway.sandbox.sandbox_statistics import STATISTICS
    from mtrl_plugins.demo.shell.machine_root import make_machine_root

    async def play(gateway: Any, numbers: Iterator[int]) -> None:
        for number in numbers:
            is_cancelled, outcome = number % CANCELLED_EACH == 0, "cancelled"
            command = json.dumps({"command": f"echo 1 > a; cat a{'; tail -f a' if is_cancelled else ''}"})
            with anyio.move_on_after(CANCEL_S if is_cancelled else STEP_TIMEOUT_S):
                async with gateway.open(Task()) as session:
                    outcome = (await session.call(ToolCall("1", "shell", command))).outcome
                    try:
                        outcome = f"{outcome}, graded {(await session.finish())['grade']:g}"
                    except Unavailable:
                        outcome = f"{outcome}, not graded"
            sampler.count(outcome)

    with tempfile.TemporaryDirectory() as data:
        os.environ["XDG_DATA_HOME"] = data
        root = make_machine_root()
        with serving_boxes(sampler) as urls, open_files({}, BOXES % (root, ",".join(urls))) as files:
            async with Gateway.load(*files) as gateway:
                with killing(sampler, BOX_WORDS, PIECES_PER_BOX_KILL):
                    for part in _split(range(count), SAMPLES):
                        numbers = iter(part)
                        async with anyio.create_task_group() as tasks:
                            for _ in range(CONCURRENCY):
                                tasks.start_soon(play, gateway, numbers)
                        await _wait_for_boxes(sampler)
                        sampler.sample()
    sampler.outcomes["boxes started"] = STATISTICS.starts


async def _wait_for_boxes(sampler: Sampler) -> None:
    """Waits until those of cancelled sessions have ended, but not for what stays."""
    least = min((sample["left"] for sample in sampler.samples), default=inf)
    with anyio.move_on_after(END_S):
        while [*_find(sampler.processes, BOX_WORDS)] or sampler.look()["left"] > least:  # noqa: ASYNC110 - no event
            await anyio.sleep(0.05)


@contextmanager
def serving_boxes(sampler: Sampler) -> Iterator[list[str]]:
    """Two servers of sandboxes, which are sampled, too."""
    command = [sys.executable, "-m", "gateway.cli", "sandboxes", "--port", "0"]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    try:
        sampler.processes += [psutil.Process(server.pid) for server in servers]
        yield [(server.stdout.readline() if server.stdout else "").split()[-1] for server in servers]
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=60)


async def train_steps(count: int, sampler: Sampler) -> None:
    """Trains the demo's model; its tools are those of the shipped configuration."""
    from rich.console import Console

    from tests.trainer.train.jobs import small_job
    from trainer.storage.run_files import METRICS_FILE, read_metrics
    from trainer.train.start import train

    settings = small_job(
        tools=str(ROOT / "tool_configs"), steps=count, prompts=2, n=2, record=False, evaluation={"every": 0},
        checkpoint={"every": max(1, count // 20)},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        run, ended = Path(name) / "run", Event()

        def follow() -> None:
            while not ended.wait(0.2):
                file = run / METRICS_FILE
                steps = file.read_bytes().count(b"\n") if file.exists() else 0
                while sampler.done < min(steps, count):
                    sampler.count()
                    if sampler.done * SAMPLES // count > len(sampler.samples):
                        sampler.sample()

        watcher = Thread(target=follow, daemon=True)
        watcher.start()
        try:
            await train(settings, run, Console(quiet=True))
        finally:
            ended.set()
            watcher.join()
        while sampler.done < len(read_metrics(run / METRICS_FILE)) and sampler.done < count:
            sampler.count()


async def _call_in_sessions(
    files: tuple[Path, Path], tool: str, arguments: Mapping[str, Any], count: int, sampler: Sampler, *,
    calls_per_session: int,
) -> None:  # fmt: skip
    from gateway import Gateway, Task, ToolCall

    written = json.dumps(arguments)

    async def work(gateway: Any, sessions: Iterator[int]) -> None:
        for calls in sessions:
            async with gateway.open(Task()) as session:
                for _ in range(calls):
                    sampler.count((await session.call(ToolCall("1", tool, written))).outcome)

    lengths = [min(calls_per_session, count - start) for start in range(0, count, calls_per_session)]
    async with Gateway.load(*files) as gateway:
        for part in _split(lengths, SAMPLES):
            sessions = iter(part)
            async with anyio.create_task_group() as tasks:
                for _ in range(CONCURRENCY):
                    tasks.start_soon(work, gateway, sessions)
            sampler.sample()  # No session is open: what is there now has been left by them.


def _split(lengths: Sequence[int], parts: int) -> Iterator[Sequence[int]]:
    """At most as many parts, of almost equal size."""
    parts = min(parts, len(lengths))
    for part in range(parts):
        yield lengths[len(lengths) * part // parts : len(lengths) * (part + 1) // parts]


@contextmanager
def killing(sampler: Sampler, words: tuple[str, ...] = SERVER_WORDS, pieces: int = PIECES_PER_KILL) -> Iterator[None]:
    """Kills a random process below this one, or one of its servers, that has a word, some times over the load."""
    ended, chance = Event(), random.Random(0)
    kills = max(1, min(KILLS, sampler.total // pieces))

    def kill() -> None:
        for number in range(1, kills + 1):
            while sampler.done < sampler.total * number / (kills + 1):
                if ended.wait(0.01):
                    return
            if servers := [*_find(sampler.processes, words)]:
                with suppress(psutil.NoSuchProcess):  # A box may have ended meanwhile.
                    chance.choice(servers).send_signal(signal.SIGKILL)
                    sampler.outcomes["killed"] += 1

    thread = Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _find(parents: Sequence[psutil.Process], words: tuple[str, ...]) -> Iterator[psutil.Process]:
    """The processes below these that have a word in their command line."""
    for process in (child for parent in parents for child in parent.children(recursive=True)):
        with suppress(psutil.Error):
            if any(word.endswith(words) for word in process.cmdline()):
                yield process


LOADS: Mapping[str, Load] = {
    "native": Load("Python function", "calls", 1_000_000, 20_000, call_natively),
    "pooled": Load("stdio server, shared", "calls", 100_000, 2_000, call_pooled),
    "process": Load("stdio server, a process per session", "sessions", 10_000, 200, open_processes),
    "boxes": Load("boxes with a root, graded, on two servers", "sessions", 3_600, 200, start_boxes),
    "training": Load("training", "steps", 2_000, 30, train_steps),
}


def measure(name: str, count: int) -> dict[str, Any]:
    """Runs a load in a process of its own; the result, or the problem."""
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else []  # Others' mounts do not count.
    command = [*alone, sys.executable, str(Path(__file__)), "--load", name, "--count", str(count)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False, env=env)
    if done.returncode:
        return {"problem": done.stderr.strip().splitlines()[-1:] or ["no output"]}
    return {"seconds": time.monotonic() - started, **json.loads(done.stdout.splitlines()[-1])}


def run_load(name: str, count: int) -> dict[str, Any]:
    """Runs a load in this process."""
    sampler = Sampler(count)
    anyio.run(LOADS[name].run, count, sampler)
    return {"count": sampler.done, "outcomes": sampler.outcomes, "samples": sampler.samples}


def growth(values: Sequence[float]) -> float:
    """How much a figure grew from the warm-up to the end, by its regression line."""
    steady = values[int(len(values) * WARM_UP) :]
    if len(steady) < 3:
        return 0.0
    return linear_regression(range(len(steady)), steady).slope * (len(steady) - 1)


def is_flat(figure: str, values: Sequence[float]) -> bool:
    """Whether the growth is within the noise."""
    allowed = ALLOWED[figure] * (mean(values) if figure == "memory" else 1)
    return growth(values) <= allowed


def format_growths(loads: Mapping[str, Any]) -> str:
    """A table of what the loads of a record left behind."""
    figures = [figure for figure in ALLOWED if all(figure in load["samples"][0] for load in loads.values())]
    lines = []
    for name, load in loads.items():
        growths = [growth([sample[figure] for sample in load["samples"]]) for figure in figures]
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(load["outcomes"].items()))
        left = " | ".join(
            f"{value:+.1f}{' MiB' if figure == 'memory' else ''}"
            for figure, value in zip(figures, growths, strict=True)
        )
        lines.append(f"| {LOADS[name].title}, {load['count']:,} {LOADS[name].unit} | {outcomes} | {left} |")
    head = f"| Load | Outcomes | {' | '.join(figures)} |"
    return "\n".join([head, "|---|---|" + "--:|" * len(figures), *lines])


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A figure over the load, from its least to its most."""
    least, most = min(values), max(values)
    picked = [values[index * len(values) // width] for index in range(min(width, len(values)))]
    return "".join(BARS[int((value - least) / ((most - least) or 1) * (len(BARS) - 1))] for value in picked)


def format_table(results: Mapping[str, Any]) -> str:
    """A row for each load and figure."""
    lines = ["| load | figure | median | growth | over time | flat |", "|---|---|--:|--:|---|---|"]
    for name, result in results.items():
        title = f"{LOADS[name].title}, {result.get('count', 0):,} {LOADS[name].unit}"
        if "problem" in result:
            lines.append(f"| {title} | | | | | **failed: {' '.join(result['problem'])}** |")
            continue
        for figure in filter(result["samples"][0].__contains__, ALLOWED):
            values = [sample[figure] for sample in result["samples"]]
            unit = " MiB" if figure == "memory" else ""
            verdict = "yes" if is_flat(figure, values) else "**no**"
            middle = sorted(values)[len(values) // 2]
            change = f"{growth(values):+.1f}{unit}"
            lines.append(f"| {title} | {figure} | {middle:.0f}{unit} | {change} | `{sparkline(values)}` | {verdict} |")
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(result["outcomes"].items()))
        lines.append(f"| {title} | outcomes | | | {outcomes} | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true", help="a minute instead of an hour")
    options.add_argument("--out", type=Path, help="folder of the results; default: bench/results, or none if --small")
    options.add_argument("--only", choices=[*LOADS], help="run one load")
    options.add_argument("--load", choices=[*LOADS], help=argparse.SUPPRESS)
    options.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.load:
        print(json.dumps(run_load(given.load, given.count)))
        return
    out, results = given.out or (None if given.small else RESULTS), {}
    if given.only and out is not None and (out / "soak.json").exists():
        results = json.loads((out / "soak.json").read_text())["loads"]
    for name, load in LOADS.items() if given.only is None else [(given.only, LOADS[given.only])]:
        results[name] = measure(name, load.small if given.small else load.count)
        print(format_table({name: results[name]}), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        about = f"Python {platform.python_version()}, {os.cpu_count()} cores"
        (out / "soak.json").write_text(json.dumps({"versions": about, "loads": results}, indent=1) + "\n")
        (out / "soak.md").write_text(f"# Soak\n\n{about}\n\n{format_table(results)}")
    flat = all(
        "problem" not in result
        and all(is_flat(figure, [one[figure] for one in result["samples"]]) for figure in result["samples"][0])
        for result in results.values()
    )
    raise SystemExit(0 if flat else 1)


if __name__ == "__main__":
    main()
