"""Throughput of rollouts: the whole loop on the torch engine, against ways to generate with transformers.

python bench/rollout.py             # some minutes; writes bench/results/rollout.{json,md}
python bench/rollout.py --quick     # smoke test; its numbers mean nothing
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import anyio  # noqa: E402
import torch  # noqa: E402

from bench import engine, rollout_loop  # noqa: E402
from tests.trainer.conversations import make_template  # noqa: E402
from tests.trainer.policy_scripts import HERMES  # noqa: E402
from trainer.engine.torch.torch_engine import TorchEngine  # noqa: E402

RESULTS = ROOT / "bench" / "results"
OURS = "mtrl, the whole loop"
DELAYS_S = (0.0, 0.05, 0.5)
PROMISED = {"generate, a rollout at a time": 5, "continuous batching": 1}
"""How many times faster than each; one rollout at a time is how a plain loop over `generate` works."""
LOCK_STEP = "generate, in lock step"
PACKAGES = ("mtrl-rl", "torch", "transformers", "anyio")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rollouts: int = 64
    in_flight: int = 256
    rounds: int = 3
    delays_s: tuple[float, ...] = DELAYS_S


@dataclass
class Results:
    """Medians over the rounds; the share of cached ids is the same in each."""

    per_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tokens per second, by the tools' delay in ms and by engine."""
    cached_of_possible: float = 0.0
    in_flight_per_s: dict[str, float] = field(default_factory=dict)
    """Tokens per second with many rollouts in flight, by the tools' delay in ms."""
    overhead_ms: dict[str, float] = field(default_factory=dict)
    """The loop's CPU per turn, by the number of turns."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one small round")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    size = Size(4, 4, 1, (0.0, 0.01)) if args.quick else Size()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    results = measure(size)
    text = format_results(results, size, load_before)
    print(text)
    out = args.out or (None if args.quick else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rollout.md").write_text("# Rollout throughput\n\n" + text)
        (out / "rollout.json").write_text(json.dumps({"size": asdict(size), **asdict(results)}, indent=1) + "\n")


def measure(size: Size) -> Results:
    """Measures everything in interleaved rounds, so that a busy moment of the machine affects all of it."""
    results, vocabulary = Results(), _vocabulary_size()
    plans = _plans_of(anyio.run(_run_loop, size.rollouts, 0.0, size.rollouts))
    for name in engine.ENGINES:
        engine.measure(name, plans[:2], vocabulary=vocabulary)
    for delay_s in size.delays_s:
        rates: dict[str, list[float]] = {}
        for _ in range(size.rounds):
            run = anyio.run(_run_loop, size.rollouts, delay_s, size.rollouts)
            rates.setdefault(OURS, []).append(run.tokens_per_s)
            if not delay_s:
                results.cached_of_possible = run.counters.cached / run.counters.possible
            for name in _peers(delay_s, rates):
                tally = engine.measure(name, plans, delay_s, vocabulary)
                rates.setdefault(name, []).append(tally.tokens / tally.wall_s)
        results.per_s[_format_ms(delay_s)] = {name: median(values) for name, values in rates.items()}
    _measure_in_flight(size, results)
    for turns in (4, 50, 200):
        count = max(1, 4 * size.rollouts // turns)
        runs = [anyio.run(rollout_loop.measure_overhead, count, turns) for _ in range(size.rounds)]
        results.overhead_ms[str(turns)] = median(1e3 * run.cpu_s / run.counters.turns for run in runs)
    return results


def _measure_in_flight(size: Size, results: Results) -> None:
    """Throughput while all slots are taken: with the start of a run, but without its end."""
    rates: dict[str, list[float]] = {}
    for _ in range(size.rounds):
        for delay_s in (min(size.delays_s), max(size.delays_s)):
            run = anyio.run(_run_loop, 3 * size.in_flight, delay_s, size.in_flight)
            rates.setdefault(_format_ms(delay_s), []).append(run.full_tokens_per_s)
    results.in_flight_per_s = {delay: median(values) for delay, values in rates.items()}


def _peers(delay_s: float, measured: Container[str]) -> Sequence[str]:
    """The peers of a round. One rollout at a time waits for every tool in turn: minutes, so it is measured once."""
    names = [name for name in engine.ENGINES if name != "torch engine"]
    return [name for name in names if not (delay_s and "at a time" in name and name in measured)]


async def _run_loop(count: int, delay_s: float, in_flight: int) -> rollout_loop.LoopRun:
    model = engine.make_model(_vocabulary_size())
    return await rollout_loop.run_loop(TorchEngine(model, max_sequences=64), count, delay_s, in_flight=in_flight)


def _vocabulary_size() -> int:
    return max(make_template(HERMES).tokenizer.control_ids.values()) + 1


def _plans_of(run: rollout_loop.LoopRun) -> list[engine.RolloutPlan]:
    """The rollouts of a run as plans, so that all engines get the same prompts, lengths and replies."""
    plans = []
    for rollout in run.rollouts:
        prompt, *rest = rollout.ledger
        lengths = [len(entry.ids) for entry in rest[::2]]
        plans.append(engine.RolloutPlan(list(prompt.ids), lengths, [*(list(entry.ids) for entry in rest[1::2]), []]))
    return plans


def _format_ms(delay_s: float) -> str:
    return f"{delay_s * 1e3:g}"


def format_results(results: Results, size: Size, load_before: float) -> str:
    """The results as Markdown."""
    names = list(next(iter(results.per_s.values())))
    lines = [
        *_describe_environment(size, load_before),
        "",
        f"| tokens/s with tools of | {' | '.join(f'{delay} ms' for delay in results.per_s)} |",
    ]
    lines.append("|---|" + "--:|" * len(results.per_s))
    for name in names:
        cells = [f"{rates[name]:,.0f}" if name in rates else "" for rates in results.per_s.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    ratios = [rates[OURS] / rates[LOCK_STEP] for rates in results.per_s.values() if LOCK_STEP in rates]
    times = ", ".join(f"{ratio:.1f}x" for ratio in ratios)
    lock_step = f"Against `{LOCK_STEP}`, where all wait for the longest turn and tool of each round: {times}."
    lines += ["", f"{lock_step} No promise is about that."]
    lines += ["", "| promise | measured | |", "|---|--:|---|"]
    lines += [
        f"| {text} | {value} | {'met' if is_met else '**missed**'} |"
        for text, value, is_met in check_promises(results, size)
    ]
    return "\n".join(lines) + "\n"


def check_promises(results: Results, size: Size) -> list[tuple[str, str, bool]]:
    """Each promise, the measured value, and whether it is met."""
    checks = []
    for delay, rates in results.per_s.items():
        for name, least in PROMISED.items():
            if name in rates:
                times = rates[OURS] / rates[name]
                checks.append((f"{delay} ms: at least {least}x `{name}`", f"{times:.1f}x", times >= least))
    share = results.cached_of_possible
    checks.append(("at least 98 % cached of what is possible", f"{share:.1%}", share >= 0.98))
    quick, slow = results.in_flight_per_s.values()
    delays = list(results.in_flight_per_s)
    text = f"{size.in_flight} in flight: tools of {delays[1]} ms leave at least 80 % of the pace at {delays[0]} ms"
    checks.append((text, f"{slow:,.0f} of {quick:,.0f}, {slow / quick:.0%}", slow >= 0.8 * quick))
    for turns, cost_ms in results.overhead_ms.items():
        text = f"at most 1 ms CPU of the loop for each of {turns} turns"
        checks.append((text, f"{cost_ms:.2f} ms", cost_ms <= 1))
    return checks


def _describe_environment(size: Size, load_before: float) -> list[str]:
    least, most = rollout_loop.TURN_TOKENS
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread; load {load_before:.1f} before the run",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}",
        "rollouts": f"{size.rollouts} of {rollout_loop.TURNS} turns with {least}-{most} tokens each, "
        f"a tool between two turns; {size.rounds} rounds in turns, medians",
    }
    return [f"{name}: {value}  " for name, value in about.items()]


if __name__ == "__main__":
    main()
