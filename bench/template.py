"""Time of rendering a turn with the chat template: only the new messages, against the whole history.

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

from tests.trainer.conversations import TASK, TOOL, calling_turn, make_calls, make_template, tool_replies  # noqa: E402
from tests.trainer.tokenizer_families import FAMILIES  # noqa: E402

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
        for turn, tail_ms, full_ms in measure_family(name, shown):
            print(f"| {name} | {turn} | {tail_ms:.2f} | {full_ms:.2f} | {full_ms / tail_ms:.1f} |")


def measure_family(name: str, turns: list[int]) -> list[tuple[int, float, float]]:
    """For each turn, the milliseconds of rendering its new messages and of rendering everything."""
    template = make_template(FAMILIES[name])
    results = []
    for turn in turns:
        tool_calls = make_calls(f"word {turn}")
        tail = tool_replies(tool_calls, REPLY)
        history = [*TASK, *(message for _ in range(turn) for message in (calling_turn(tool_calls), *tail))]
        tail_ms = median_ms(lambda tail=tail: template.encode_tail(tail, ended=True))
        full_ms = median_ms(lambda history=history: template.encode_prompt(history, [TOOL]))
        results.append((turn, tail_ms, full_ms))
    return results


def median_ms(work: Callable[[], object]) -> float:
    """The median of some runs, after a first one that fills caches."""
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)


if __name__ == "__main__":
    main()
