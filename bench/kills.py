"""Kills or stops the SGLang server at random moments of the default job, and checks that nothing is lost.

python bench/kills.py                        # 20 faults, a minute or more each; writes bench/results/kills.{json,md}
python bench/kills.py --kills 3 --steps 4    # smoke test; writes nothing without --out

The same job with the same seed runs undisturbed at the same time, for comparison.
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
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import psutil  # noqa: E402
import yaml  # noqa: E402

from gateway.types import Outcome  # noqa: E402
from trainer.engine.base import EXACT_TOLERANCE  # noqa: E402
from trainer.engine.sglang.launch import TESTED  # noqa: E402
from trainer.rollout.rollout import Rollout  # noqa: E402
from trainer.rollout.steppers import CALLS_INFO  # noqa: E402
from trainer.storage.rollout_file import Rollouts  # noqa: E402
from trainer.storage.run_files import METRICS_FILE as METRICS  # noqa: E402
from trainer.storage.run_files import read_metrics  # noqa: E402
from trainer.train.evaluate import VARIANTS  # noqa: E402

JOB = ROOT / "mtrl_plugins" / "demo" / "jobs" / "default.yaml"
RESULTS = ROOT / "bench" / "results"
KILLS = 20
START_S = 600.0
MAX_FAULT_DELAY_S = 7.0
"""The longest time from the server's start to a fault: with more, a fast machine would finish before the last fault."""
READY_TEXT = "fired up"
"""In a server's log once it is ready."""
COUNTED_TOOL = "look_up"
FINAL_STEPS = 10
"""The final reward is the mean over these last steps."""
MAX_HARM = 0.03
"""How much less than the undisturbed run is tolerated; seeds of undisturbed runs differ by as much."""
WALL_S = 1800
"""Limit of a rollout's duration, which includes restarts of the server."""
RUN = "run"
STRUCK, QUIET = "struck", "undisturbed"
TOOL = '''
import json
from pathlib import Path

from mtrl_plugins.demo.facts.lookup import LookUp


class Counted(LookUp):
    """Writes a line for each call, so that repeated calls are noticed."""

    async def execute(self, instance_id, parameters, **kwargs):
        with Path({file!r}).open("a") as calls:
            calls.write(json.dumps(parameters["name"]) + "\\n")  # A name may have line breaks.
        return await super().execute(instance_id, parameters, **kwargs)
'''


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run's figures."""

    steps: int
    rollouts: int
    """Rollouts that are trained."""
    missing: int
    """Expected rollouts that do not exist."""
    doubled: int
    """Rollouts that exist twice."""
    made_anew: int
    """Rollouts replaced because of infrastructure failures."""
    stale: int
    """Turns with ids sampled by other weights than those of their step."""
    carried_out: int
    """Calls as the tool counts them."""
    called: int
    """The same calls in the rollouts."""
    apart: float
    """The largest difference between a trained token's logprob at the engine and in the trainer."""
    reward: float
    """Mean of the last steps."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Number of faults by kind."""
    struck_at: tuple[int, ...] = ()
    """For each fault, the last finished step."""
    wall_s: float = 0.0

    @property
    def is_intact(self) -> bool:
        """Whether nothing was lost, doubled, called twice, or sampled by weights that were not published."""
        return (
            not (self.missing or self.doubled or self.stale)
            and self.carried_out == self.called
            and self.apart < EXACT_TOLERANCE
        )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=KILLS)
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--seed", type=int, default=0, help="of the times of faults")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    is_full_run = args.kills >= KILLS and args.steps is None
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        rng = random.Random(args.seed)
        futures = {
            name: pool.submit(run_with_faults, Path(folder) / name, kills, rng, args.steps)
            for name, kills in ((STRUCK, args.kills), (QUIET, 0))
        }
        results = {name: future.result() for name, future in futures.items()}
        evaluations = {name: _evaluate(Path(folder) / name / RUN) for name in results} if is_full_run else {}
    figures = {name: {"reward": result.reward} | evaluations.get(name, {}) for name, result in results.items()}
    is_intact = all(result.is_intact for result in results.values())
    harm = compute_harm(figures)
    content = {"about": describe_environment(), "found": {name: asdict(result) for name, result in results.items()}}
    content |= {"learned": figures, "kept": is_intact, "harm": round(harm, 4), "bar": MAX_HARM}
    print(json.dumps(content, indent=1))
    out = args.out or (RESULTS if is_full_run else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "kills.json").write_text(json.dumps(content, indent=1) + "\n")
        (out / "kills.md").write_text(format_results(content))
    return int(not is_intact or (is_full_run and harm > MAX_HARM))


def compute_harm(figures: Mapping[str, Mapping[str, float]]) -> float:
    """The largest amount by which the disturbed run is worse, over all figures."""
    return max(value - figures[STRUCK][name] for name, value in figures[QUIET].items() if not name.endswith("_before"))


RESULT_TITLES = {
    "steps": "steps",
    "rollouts": "rollouts that are trained",
    "missing": "expected rollouts that are missing",
    "doubled": "rollouts that exist twice",
    "stale": "turns sampled by other weights than the step's",
    "called": "calls of the counting tool, by the rollouts",
    "carried_out": "the same, by the tool",
    "made_anew": "rollouts replaced after failures",
    "apart": "largest logprob difference between engine and trainer",
    "wall_s": "seconds",
}
FIGURE_TITLES = {
    "reward": f"reward of the last {FINAL_STEPS} steps",
    "sampled_before": "success on held-out tasks, sampled, before",
    "greedy_before": "the same, greedy",
    "sampled": "success on held-out tasks, sampled, after",
    "greedy": "the same, greedy",
}


def format_results(content: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    results, figures = content["found"], content["learned"]
    faults = results[STRUCK]["faults"]
    lines = [f"{name}: {value}  " for name, value in content["about"].items()]
    lines += ["faults: " + ", ".join(f"{count} x {name}" for name, count in sorted(faults.items())) + "  "]
    lines += [f"faults came after step: {', '.join(map(str, results[STRUCK]['struck_at']))}  ", ""]
    lines += [f"| | {STRUCK} {sum(faults.values())} times | {QUIET} |", "|---|--:|--:|"]
    rows = [(title, [results[name][key] for name in (STRUCK, QUIET)], ".3g" if key == "apart" else ",.0f")
            for key, title in RESULT_TITLES.items()]  # fmt: skip
    rows += [(title, [figures[name][key] for name in (STRUCK, QUIET)], ".3f")
             for key, title in FIGURE_TITLES.items() if key in figures[QUIET]]  # fmt: skip
    lines += [f"| {title} | {' | '.join(format(value, spec) for value in values)} |" for title, values, spec in rows]
    intact = "met" if content["kept"] else "**missed**"
    unharmed = "met" if content["harm"] <= content["bar"] else "**missed**"
    lines += ["", "| promise | |", "|---|---|", f"| nothing lost, doubled, called twice or stale | {intact} |"]
    lines += [f"| success and reward are at most {content['bar']:g} less | {unharmed}: {content['harm']:.3f} |"]
    return "\n".join(["# A run whose SGLang server is killed", "", *lines]) + "\n"


def run_with_faults(
    folder: Path, kills: int, rng: random.Random, steps: int | None = None, changes: Mapping[str, Any] | None = None
) -> RunResult:
    """Runs the job, with changed settings, under faults.

    Raises RuntimeError if the run fails, or ends before the last fault.
    """
    run, file, calls = folder / RUN, folder / "job.yaml", folder / "carried_out"
    folder.mkdir(parents=True, exist_ok=True)
    calls.touch()
    tools = _write_tool_files(folder / "tools", calls)
    settings = yaml.safe_load(JOB.read_text()) | {"tools": str(tools), "engine": "sglang"}
    settings |= {"mcp": str(ROOT / "mcp_servers.json"), "record": False, "early_stop": None, **(changes or {})}
    settings["evaluation"] = settings["evaluation"] | {"every": 0, "after": False}  # Its calls are in no rollout.
    settings["limits"] = settings["limits"] | {"timeout_s": WALL_S}
    settings |= {} if steps is None else {"steps": steps}
    file.write_text(yaml.safe_dump(settings))
    began = time.monotonic()
    command = [sys.executable, "-m", "trainer.cli", "--config", str(file), "--out", str(run)]
    output = folder / "output"
    with output.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as trainer:
        try:
            faults, struck_at = _inject_faults(trainer, run / "logs/sglang-0.log", kills, rng)
            trainer.wait(START_S * 3)
        finally:
            trainer.terminate()
    if trainer.returncode or sum(faults.values()) < kills:
        tail = output.read_text()[-4000:]
        raise RuntimeError(f"after {sum(faults.values())} faults the run ended with {trainer.returncode}:\n{tail}")
    return replace(
        _read_run(run, settings, len(calls.read_text().splitlines())),
        faults=dict(faults),
        struck_at=tuple(struck_at),
        wall_s=round(time.monotonic() - began, 1),
    )


def _write_tool_files(folder: Path, calls: Path) -> Path:
    """The shipped tools, one of which counts its calls."""
    folder.mkdir()
    for pattern in ("*.yaml", "*.py"):
        for file in (ROOT / "tool_configs").glob(pattern):
            (folder / file.name).write_text(file.read_text())
    (folder / "counted.py").write_text(TOOL.format(file=str(calls)))
    (folder / "lookup.yaml").write_text("tools: [{class_name: counted.Counted}]\n")
    return folder


def _inject_faults(
    trainer: subprocess.Popen[bytes], log: Path, kills: int, rng: random.Random
) -> tuple[Counter[str], list[int]]:
    """Injects one fault after the other, each while the server is up; returns the kinds, and the step before each."""
    faults: Counter[str] = Counter()
    struck_at: list[int] = []
    run = log.parents[1]
    run_info = run / "run.json"  # Written once everything is open: a failing start is reported, not retried.

    def is_up(number: int) -> bool:
        return run_info.exists() and log.read_text(errors="replace").count(READY_TEXT) > number

    for number in range(kills):
        if not _wait_until(trainer, partial(is_up, number)):
            break
        time.sleep(rng.random() * MAX_FAULT_DELAY_S)
        if (leader := _find_server(trainer.pid)) is None:
            break
        fault = "stopped" if number % 10 == 9 else rng.choice(("leader killed", "scheduler killed", "all killed"))
        _inject(fault, leader)
        faults[fault] += 1
        metrics = run / METRICS
        struck_at.append(int(read_metrics(metrics)[-1]["step"]) if metrics.exists() and read_metrics(metrics) else 0)
    return faults, struck_at


def _wait_until(trainer: subprocess.Popen[bytes], condition: Callable[[], bool]) -> bool:
    """False if the trainer ends or the time is up before."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and trainer.poll() is None:
        if condition():
            return True
        time.sleep(0.1)
    return False


def _find_server(trainer_pid: int) -> psutil.Process | None:
    """The leader of the server's processes."""
    try:
        children = psutil.Process(trainer_pid).children(recursive=True)  # below the process that supervises it
        servers = [child for child in children if any("launch.py" in word for word in child.cmdline())]
        return min(servers, key=psutil.Process.create_time, default=None)
    except psutil.NoSuchProcess:
        return None


def _inject(fault: str, leader: psutil.Process) -> None:
    group = [leader, *leader.children(recursive=True)]
    targets = {
        "leader killed": group[:1],
        "scheduler killed": [child for child in group if child.name().startswith("sglang::sch")] or group[:1],
    }.get(fault, group)
    for process in targets:
        process.send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)


def _read_run(run: Path, settings: Mapping[str, Any], carried_out: int) -> RunResult:
    rollouts, steps = list(Rollouts(run)), read_metrics(run / METRICS)
    trained = [rollout for rollout in rollouts if not rollout.stop.is_infrastructure]
    counts = Counter((rollout.group, rollout.index) for rollout in trained)
    expected = {(f"{step}-0-{group}", index) for step in range(1, settings["steps"] + 1)
                for group in range(settings["prompts"]) for index in range(settings["n"])}  # fmt: skip
    return RunResult(
        steps=int(steps[-1]["step"]),
        rollouts=sum(counts.values()),
        missing=len(expected - counts.keys()),
        doubled=sum(count - 1 for count in counts.values()),
        made_anew=len(rollouts) - len(trained),
        stale=sum(map(_count_stale_turns, trained)),
        carried_out=carried_out,
        called=sum(map(_count_calls, rollouts)),
        apart=max((step["mismatch/max"] for step in steps if "mismatch/max" in step), default=0.0),
        reward=round(mean(step["reward/mean"] for step in steps[-FINAL_STEPS:]), 4),
    )


def _count_calls(rollout: Rollout) -> int:
    """Calls that reached the counting tool, in all ledgers of the rollout."""
    entries = [entry for ledger in rollout.ledgers for entry in ledger]
    calls = [call for entry in entries for call in entry.info.get(CALLS_INFO, ())]
    return sum(call["name"] == COUNTED_TOOL and call["outcome"] == Outcome.OK for call in calls)


def _count_stale_turns(rollout: Rollout) -> int:
    """Turns not sampled by the weights of the step before the rollout's."""
    version = int(rollout.group.partition("-")[0]) - 1
    return sum({*turn.versions} != {version} for turn in rollout.turns if turn.ids)


def _evaluate(run: Path) -> dict[str, Any]:
    """Success before and after on held-out tasks, without an SGLang server."""
    command = [sys.executable, "-m", "trainer.cli", "eval", str(run), "--json"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S * 3, check=True).stdout
    return {name: value for name, value in json.loads(output).items() if name in VARIANTS}


def describe_environment() -> dict[str, str]:
    """Date, machine, versions and changed limits."""
    versions = (
        f"Python {platform.python_version()}, SGLang {TESTED[0]}, mtrl {version('mtrl-rl')}, torch {version('torch')}"
    )
    machine = f"{os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f} in the end"
    job_limit = yaml.safe_load(JOB.read_text())["limits"]["timeout_s"]
    limits = f"a rollout of either run may take {WALL_S} s instead of the job's {job_limit}, to include server restarts"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions, "limits": limits}


if __name__ == "__main__":
    raise SystemExit(main())
