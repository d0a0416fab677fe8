"""Measures a turn's template work by turn: appended by difference, beside a render of the whole history.

python bench/template.py            # 200 turns of one tool call each; a minute or less
python bench/template.py --turns 40
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.trainer.conversations import TASK, TOOL, asks, calls, replies, template_for  # noqa: E402
from tests.trainer.tokenizers_for_tests import FAMILIES  # noqa: E402

ROUNDS = 5
REPLY = "The gnu is a large antelope of the plains. " * 8


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=200)
    turns = options.parse_args().turns
    shown = [turn for turn in (1, 10, 50, 100, 200) if turn <= turns]
    print("| family | turn | by difference, ms | full render, ms | ratio |")
    print("|---|---:|---:|---:|---:|")
    for name in ("hermes", "qwen3", "llama3", "deepseek"):
        for turn, appended, rendered in rows(name, shown):
            print(f"| {name} | {turn} | {appended:.2f} | {rendered:.2f} | {rendered / appended:.1f} |")


def rows(name: str, shown: list[int]) -> list[tuple[int, float, float]]:
    """For each turn to show, how long its tail and a render of everything take."""
    template = template_for(FAMILIES[name])
    found = []
    for turn in shown:
        made = calls(f"word {turn}")
        after = replies(made, REPLY)
        history = [*TASK, *(message for _ in range(turn) for message in (asks(made), *after))]
        found.append(
            (
                turn,
                spent(lambda after=after: template.tail(after, ended=True)),
                spent(lambda history=history: template.open(history, [TOOL])),
            )
        )
    return found


def spent(work: Callable[[], object]) -> float:
    """Milliseconds, the median of some rounds after a first that fills what is kept."""
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)


if __name__ == "__main__":
    main()
