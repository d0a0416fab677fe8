"""Measures rollouts: the whole loop on the torch engine beside what transformers offers, in one run.

python bench/rollout.py             # some minutes; writes bench/results/rollout.{json,md}
python bench/rollout.py --quick     # whether everything still runs; its numbers mean nothing
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

from bench import engine, loop  # noqa: E402
from tests.trainer.conversations import template_for  # noqa: E402
from tests.trainer.scripts import HERMES  # noqa: E402
from trainer.engine.torch import TorchEngine  # noqa: E402

RESULTS = ROOT / "bench" / "results"
OURS = "mtrl, the whole loop"
DELAYS_S = (0.0, 0.05, 0.5)
PROMISED = {"generate, a rollout at a time": 5, "continuous batching": 1}
"""How many times as quick as each: turn by turn is one rollout at a time, as a loop over `generate` does it."""
LOCK_STEP = "generate, in lock step"
SHOWN = ("mtrl", "torch", "transformers", "anyio")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rollouts: int = 64
    in_flight: int = 256
    rounds: int = 3
    delays_s: tuple[float, ...] = DELAYS_S


@dataclass
class Found:
    """Medians over the rounds, but for the counts, which are the same in each."""

    per_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tokens a second by engine and by the tools' delay in ms."""
    cached_of_possible: float = 0.0
    in_flight_per_s: dict[str, float] = field(default_factory=dict)
    overhead_ms: dict[str, float] = field(default_factory=dict)
    """CPU of a turn by the number of turns."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one small round")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    asked = options.parse_args()
    size = Size(8, 16, 1, (0.0, 0.01)) if asked.quick else Size()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    found = measured(size)
    text = told(found, size, load_before)
    print(text)
    out = asked.out or (None if asked.quick else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rollout.md").write_text("# Rollouts beside their peers\n\n" + text)
        (out / "rollout.json").write_text(json.dumps({"size": asdict(size), **asdict(found)}, indent=1) + "\n")


def measured(size: Size) -> Found:
    """All that is compared takes turns, so that a busy moment of the machine falls on all of it."""
    found, vocabulary = Found(), _vocabulary()
    plans = _plans(anyio.run(_ours, size.rollouts, 0.0, size.rollouts))
    for name in engine.PEERS:
        engine.measure(name, plans[:2], vocabulary=vocabulary)
    for delay_s in size.delays_s:
        paces: dict[str, list[float]] = {}
        for _ in range(size.rounds):
            ran = anyio.run(_ours, size.rollouts, delay_s, size.rollouts)
            paces.setdefault(OURS, []).append(ran.per_s)
            if not delay_s:
                found.cached_of_possible = ran.seen.cached / ran.seen.possible
            for name in _peers(delay_s, paces):
                tally = engine.measure(name, plans, delay_s, vocabulary)
                paces.setdefault(name, []).append(tally.tokens / tally.wall_s)
        found.per_s[_ms(delay_s)] = {name: median(some) for name, some in paces.items()}
    _of_many(size, found)
    for turns in (4, 50, 200):
        costs = [anyio.run(loop.overhead, max(1, 256 // turns), turns) for _ in range(size.rounds)]
        found.overhead_ms[str(turns)] = median(1e3 * ran.cpu_s / ran.seen.turns for ran in costs)
    return found


def _of_many(size: Size, found: Found) -> None:
    """As long as so many are in flight: how a run begins is in it, and how it ends, with ever fewer, is not."""
    paces: dict[str, list[float]] = {}
    for _ in range(size.rounds):
        for delay_s in (min(size.delays_s), max(size.delays_s)):
            ran = anyio.run(_ours, 3 * size.in_flight, delay_s, size.in_flight)
            paces.setdefault(_ms(delay_s), []).append(ran.full_per_s)
    found.in_flight_per_s = {delay: median(some) for delay, some in paces.items()}


def _peers(delay_s: float, known: Container[str]) -> Sequence[str]:
    """A rollout at a time sleeps through all tools one after the other: minutes, which are the same each time."""
    names = [name for name in engine.PEERS if name != "torch engine"]
    return [name for name in names if not (delay_s and "at a time" in name and name in known)]


async def _ours(count: int, delay_s: float, in_flight: int) -> loop.Ran:
    weights = engine.model(_vocabulary())
    return await loop.ran(TorchEngine(weights, rows=64), count, delay_s, in_flight=in_flight)


def _vocabulary() -> int:
    return max(template_for(HERMES).tokens.control.values()) + 1


def _plans(ran: loop.Ran) -> list[engine.Plan]:
    """The same tokens for all: prompts, lengths and answers are those that the loop had."""
    made = []
    for rollout in ran.rollouts:
        prompt, *rest = rollout.ledger
        lengths = [len(entry.ids) for entry in rest[::2]]
        made.append(engine.Plan(list(prompt.ids), lengths, [*(list(entry.ids) for entry in rest[1::2]), []]))
    return made


def _ms(delay_s: float) -> str:
    return f"{delay_s * 1e3:g}"


def told(found: Found, size: Size, load_before: float) -> str:
    names = list(next(iter(found.per_s.values())))
    lines = [
        *_about(size, load_before),
        "",
        f"| tokens/s with tools of | {' | '.join(f'{d} ms' for d in found.per_s)} |",
    ]
    lines.append("|---|" + "--:|" * len(found.per_s))
    for name in names:
        cells = [f"{paces[name]:,.0f}" if name in paces else "" for paces in found.per_s.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    times = ", ".join(f"{paces[OURS] / paces[LOCK_STEP]:.1f}x" for paces in found.per_s.values() if LOCK_STEP in paces)
    beside = (
        f"Beside `{LOCK_STEP}`, where all wait for the longest turn and tool of each round, the loop makes {times}."
    )
    lines += ["", f"{beside} No promise is about that."]
    lines += ["", "| promise | measured | |", "|---|--:|---|"]
    lines += [f"| {text} | {got} | {'met' if kept else '**missed**'} |" for text, got, kept in promises(found, size)]
    return "\n".join(lines) + "\n"


def promises(found: Found, size: Size) -> list[tuple[str, str, bool]]:
    kept = []
    for delay, paces in found.per_s.items():
        for name, least in PROMISED.items():
            if name in paces:
                times = paces[OURS] / paces[name]
                kept.append((f"{delay} ms: at least {least}x `{name}`", f"{times:.1f}x", times >= least))
    share = found.cached_of_possible
    kept.append(("at least 98 % cached of what is possible", f"{share:.1%}", share >= 0.98))
    quick, slow = found.in_flight_per_s.values()
    delays = list(found.in_flight_per_s)
    text = f"{size.in_flight} in flight: tools of {delays[1]} ms leave at least 80 % of the pace at {delays[0]} ms"
    kept.append((text, f"{slow:,.0f} of {quick:,.0f}, {slow / quick:.0%}", slow >= 0.8 * quick))
    for turns, cost_ms in found.overhead_ms.items():
        text = f"at most 1 ms CPU of the loop for each of {turns} turns"
        kept.append((text, f"{cost_ms:.2f} ms", cost_ms <= 1))
    return kept


def _about(size: Size, load_before: float) -> list[str]:
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread; load {load_before:.1f} before the run",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in SHOWN)}",
        "rollouts": f"{size.rollouts} of {loop.TURNS} turns with {loop.LENGTHS[0]}-{loop.LENGTHS[1]} tokens each, "
        f"a tool between two turns; {size.rounds} rounds in turns, medians",
    }
    return [f"{name}: {value}  " for name, value in about.items()]


if __name__ == "__main__":
    main()
