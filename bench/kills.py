"""The default job while its SGLang server is killed, or stands still, at random moments: what is lost, and learned.

python bench/kills.py                        # 20 faults, a minute or more each; writes bench/results/kills.{json,md}
python bench/kills.py --kills 3 --steps 4    # whether it still holds; nothing is written without --out

The same job with the same seed, where nothing is killed, is run at the same time: what it learns is the measure.
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
from trainer.engine.base import EXACT  # noqa: E402
from trainer.engine.sglang.launch import TESTED  # noqa: E402
from trainer.run.file import Rollouts  # noqa: E402
from trainer.run.history import NAME as METRICS  # noqa: E402
from trainer.run.history import history  # noqa: E402
from trainer.run.rollout import Rollout  # noqa: E402
from trainer.steps import OF_CALLS  # noqa: E402
from trainer.train.compare import WAYS  # noqa: E402

JOB = ROOT / "trainer" / "jobs" / "default.yaml"
RESULTS = ROOT / "bench" / "results"
KILLS = 20
START_S = 600.0
STRIKE_S = 7.0
"""A fault comes at most so long after the server is there: longer, and a quick machine is done before the last."""
READY = "fired up"
"""What a server's log says when it is there."""
COUNTED = "look_up"
FINAL = 10
"""The last steps, of which the mean is the final reward."""
HARM = 0.03
"""Less than the undisturbed run's by more than this is harm: where nothing is killed, seeds differ by as much."""
WALL_S = 1800
"""That a rollout may take: a server that was killed is to be there again within it."""
RUN = "run"
STRUCK, QUIET = "struck", "undisturbed"
TOOL = '''
import json
from pathlib import Path

from trainer.demo.facts.lookup import LookUp


class Counted(LookUp):
    """Every time it is carried out there is a line more: what it did to the world."""

    async def execute(self, instance_id, parameters, **kwargs):
        with Path({file!r}).open("a") as lines:
            lines.write(json.dumps(parameters["name"]) + "\\n")  # A name may hold line ends.
        return await super().execute(instance_id, parameters, **kwargs)
'''


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the run's folder once it is over."""

    steps: int
    rollouts: int
    """That count."""
    missing: int
    """Those that there should be, and are not."""
    doubled: int
    """That count twice."""
    made_anew: int
    """By the rules for groups, because what they were written with failed too often."""
    stale: int
    """Turns with ids of other weights than those of their step."""
    carried_out: int
    """Calls of a tool, as the tool counts them."""
    called: int
    """The same calls, as rollouts have them."""
    apart: float
    """The largest difference between a trained token's logprob at the engine and in the trainer."""
    reward: float
    """Of the last steps."""
    faults: Mapping[str, int] = field(default_factory=dict)
    struck_at: tuple[int, ...] = ()
    """For each fault, how many steps were over."""
    wall_s: float = 0.0

    @property
    def kept(self) -> bool:
        """Nothing was lost, counted twice, done twice, or written with weights that were not published."""
        return (
            not (self.missing or self.doubled or self.stale) and self.carried_out == self.called and self.apart < EXACT
        )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=KILLS)
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--seed", type=int, default=0, help="of the moments")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    asked = options.parse_args()
    whole = asked.kills >= KILLS and asked.steps is None
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as both:
        draw = random.Random(asked.seed)
        runs = {
            name: both.submit(disturbed, Path(folder) / name, many, draw, asked.steps)
            for name, many in ((STRUCK, asked.kills), (QUIET, 0))
        }
        found = {name: run.result() for name, run in runs.items()}
        learned = {name: _learned(Path(folder) / name / RUN) for name in found} if whole else {}
    figures = {name: {"reward": one.reward} | learned.get(name, {}) for name, one in found.items()}
    kept = all(one.kept for one in found.values())
    harmed = whole and harm(figures) > HARM
    told = {"about": _about(), "found": {name: asdict(one) for name, one in found.items()}, "learned": figures}
    told |= {"kept": kept, "harm": round(harm(figures), 4), "bar": HARM}
    print(json.dumps(told, indent=1))
    out = asked.out or (RESULTS if whole else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "kills.json").write_text(json.dumps(told, indent=1) + "\n")
        (out / "kills.md").write_text(table(told))
    return int(not kept or harmed)


def harm(figures: Mapping[str, Mapping[str, float]]) -> float:
    """By how much the disturbed run came to less, in whatever it is furthest behind."""
    return max(value - figures[STRUCK][name] for name, value in figures[QUIET].items() if not name.endswith("_before"))


TITLES = {
    "steps": "steps",
    "rollouts": "rollouts that count",
    "missing": "of those that there should be, missing",
    "doubled": "counted twice",
    "stale": "turns with ids of other weights than the step's",
    "called": "calls of the tool that counts, by the rollouts",
    "carried_out": "the same, by the tool",
    "made_anew": "rollouts made anew",
    "apart": "engine and trainer apart in logprob, at the most",
    "wall_s": "seconds",
}
WAYS_TOLD = {
    "reward": f"reward of the last {FINAL} steps",
    "sampled_before": "success on held-out tasks, sampled, before",
    "greedy_before": "the same, greedy",
    "sampled": "success on held-out tasks, sampled, after",
    "greedy": "the same, greedy",
}


def table(told: Mapping[str, Any]) -> str:
    found, learned = told["found"], told["learned"]
    faults = found[STRUCK]["faults"]
    lines = [f"{name}: {value}  " for name, value in told["about"].items()]
    lines += ["faults: " + ", ".join(f"{many} x {name}" for name, many in sorted(faults.items())) + "  "]
    lines += [f"struck after step: {', '.join(map(str, found[STRUCK]['struck_at']))}  ", ""]
    lines += [f"| | {STRUCK} {sum(faults.values())} times | {QUIET} |", "|---|--:|--:|"]
    rows = [(title, [found[name][key] for name in (STRUCK, QUIET)], ".3g" if key == "apart" else ",.0f")
            for key, title in TITLES.items()]  # fmt: skip
    rows += [(title, [learned[name][key] for name in (STRUCK, QUIET)], ".3f")
             for key, title in WAYS_TOLD.items() if key in learned[QUIET]]  # fmt: skip
    lines += [f"| {title} | {' | '.join(format(value, form) for value in values)} |" for title, values, form in rows]
    kept = "met" if told["kept"] else "**missed**"
    unharmed = "met" if told["harm"] <= told["bar"] else "**missed**"
    lines += ["", "| promise | |", "|---|---|", f"| nothing lost, counted twice, done twice or stale | {kept} |"]
    lines += [f"| what is learned is at most {told['bar']:g} less | {unharmed}: {told['harm']:.3f} |"]
    return "\n".join(["# A run whose SGLang server is killed", "", *lines]) + "\n"


def disturbed(
    folder: Path, kills: int, draw: random.Random, steps: int | None = None, more: Mapping[str, Any] | None = None
) -> Found:
    """`more` are settings of the job. Raises RuntimeError where the run fails, or is over before the last fault."""
    run, file, lines = folder / RUN, folder / "job.yaml", folder / "carried_out"
    folder.mkdir(parents=True, exist_ok=True)
    lines.touch()
    settings = yaml.safe_load(JOB.read_text()) | {"tools": str(_tools(folder / "tools", lines)), "engine": "sglang"}
    settings |= {"mcp": str(ROOT / "mcp_servers.json"), "record": False, **(more or {})}
    settings["evaluation"] = settings["evaluation"] | {"every": 0, "after": False}  # Its calls are in no rollout.
    settings["limits"] = settings["limits"] | {"wall_s": WALL_S}
    settings |= {} if steps is None else {"steps": steps}
    file.write_text(yaml.safe_dump(settings))
    began = time.monotonic()
    command = [sys.executable, "-m", "trainer.cli", "--config", str(file), "--out", str(run)]
    said = folder / "said"
    with said.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as trainer:
        try:
            faults, struck_at = _strike(trainer, run / "sglang-0.log", kills, draw)
            trainer.wait(START_S * 3)
        finally:
            trainer.terminate()
    if trainer.returncode or sum(faults.values()) < kills:
        raise RuntimeError(f"{sum(faults.values())} faults, then {trainer.returncode}:\n{said.read_text()[-4000:]}")
    return replace(
        _found(run, settings, len(lines.read_text().splitlines())),
        faults=dict(faults),
        struck_at=tuple(struck_at),
        wall_s=round(time.monotonic() - began, 1),
    )


def _tools(folder: Path, lines: Path) -> Path:
    """The shipped ones, of which one counts how often it is carried out."""
    folder.mkdir()
    for file in (ROOT / "tool_configs").glob("*.yaml"):
        (folder / file.name).write_text(file.read_text())
    for file in (ROOT / "tool_configs").glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    (folder / "counted.py").write_text(TOOL.format(file=str(lines)))
    (folder / "lookup.yaml").write_text("tools: [{class_name: counted.Counted}]\n")
    return folder


def _strike(
    trainer: subprocess.Popen[bytes], log: Path, kills: int, draw: random.Random
) -> tuple[Counter[str], list[int]]:
    """One fault after the other, each while the server is there and the run goes on; and after which step it came."""
    faults: Counter[str] = Counter()
    struck_at: list[int] = []
    opened = log.with_name("run.json")  # There once everything is open: who cannot start at all is told so.
    for number in range(kills):
        if not _until(trainer, lambda: opened.exists() and log.read_text(errors="replace").count(READY) > number):  # noqa: B023
            break
        time.sleep(draw.random() * STRIKE_S)  # any moment: this is what is tested
        if (leader := _leader(trainer.pid)) is None:
            break
        fault = "stopped" if number % 10 == 9 else draw.choice(("leader killed", "scheduler killed", "all killed"))
        _fault(fault, leader)
        faults[fault] += 1
        metrics = log.with_name(METRICS)
        struck_at.append(int(history(metrics)[-1]["step"]) if metrics.exists() and history(metrics) else 0)
    return faults, struck_at


def _until(trainer: subprocess.Popen[bytes], holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + START_S
    while time.monotonic() < until and trainer.poll() is None:
        if holds():
            return True
        time.sleep(0.1)
    return False


def _leader(trainer: int) -> psutil.Process | None:
    try:
        children = psutil.Process(trainer).children()
        return next((one for one in children if any("launch.py" in word for word in one.cmdline())), None)
    except psutil.NoSuchProcess:
        return None


def _fault(fault: str, leader: psutil.Process) -> None:
    group = [leader, *leader.children(recursive=True)]
    struck = {
        "leader killed": group[:1],
        "scheduler killed": [one for one in group if one.name().startswith("sglang::sch")] or group[:1],
    }.get(fault, group)
    for one in struck:
        one.send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)


def _found(run: Path, settings: Mapping[str, Any], carried_out: int) -> Found:
    rollouts, steps = list(Rollouts(run)), history(run / METRICS)
    counted = Counter((one.group, one.index) for one in rollouts if not one.stop.infrastructure)
    should = {(f"{step}-0-{group}", index) for step in range(1, settings["steps"] + 1)
              for group in range(settings["prompts"]) for index in range(settings["n"])}  # fmt: skip
    return Found(
        steps=int(steps[-1]["step"]),
        rollouts=sum(counted.values()),
        missing=len(should - counted.keys()),
        doubled=sum(many - 1 for many in counted.values()),
        made_anew=sum(one.stop.infrastructure for one in rollouts),
        stale=sum(_stale(one) for one in rollouts if not one.stop.infrastructure),
        carried_out=carried_out,
        called=sum(map(_calls, rollouts)),
        apart=max((step["mismatch/max"] for step in steps if "mismatch/max" in step), default=0.0),
        reward=round(mean(step["reward/mean"] for step in steps[-FINAL:]), 4),
    )


def _calls(rollout: Rollout) -> int:
    """Of the tool that counts, those that reached it: what it answered is the rollout's, whatever became of that."""
    told = [one for ledger in rollout.ledgers for entry in ledger for one in entry.info.get(OF_CALLS, ())]
    return sum(one["name"] == COUNTED and one["outcome"] == Outcome.OK for one in told)


def _stale(rollout: Rollout) -> int:
    """A step's rollouts are written with the weights of the step before it."""
    version = int(rollout.group.partition("-")[0]) - 1
    return sum({*turn.versions} != {version} for turn in rollout.turns if turn.ids)


def _learned(run: Path) -> dict[str, Any]:
    """Success before and after on tasks that were held out, without any server."""
    command = [sys.executable, "-m", "trainer.cli", "eval", str(run), "--json"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S * 3, check=True).stdout
    return {name: value for name, value in json.loads(told).items() if name in WAYS}


def _about() -> dict[str, str]:
    versions = (
        f"Python {platform.python_version()}, SGLang {TESTED[0]}, mtrl {version('mtrl')}, torch {version('torch')}"
    )
    machine = f"{os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f} in the end"
    own = yaml.safe_load(JOB.read_text())["limits"]["wall_s"]
    limits = f"a rollout of either run may take {WALL_S} s, where the job says {own}: starts of a server come into it"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions, "limits": limits}


if __name__ == "__main__":
    raise SystemExit(main())
