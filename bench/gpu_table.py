"""The GPU benchmark's results as a Markdown table, and whether its bars are met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

JOB, COLOCATED_JOB = "default job", "default job, taking turns"
BARS = (
    (JOB, "greedy", "success on held-out tasks", 0.9),
    ("Qwen2.5-0.5B", "of_plain", "of SGLang's own tokens/s", 0.95),
    ("Qwen2.5-1.5B", "of_plain", "of SGLang's own tokens/s", 0.95),
)
"""Part, figure, its description, and its least value."""
ROWS = (
    ("rollout, tokens/s", "rollout_tokens_per_s", ",.0f"),
    ("of SGLang's own, the same requests without tools", "of_plain", ".1%"),
    ("cached of what could be", "cached_of_possible", ".1%"),
    ("update, tokens/s", "update_tokens_per_s", ",.0f"),
    ("TRL's update on the same batch, tokens/s", "trl_update_tokens_per_s", ",.0f"),
    ("times as quick as TRL's", "update_of_trl", ".1f"),
    ("tokens that the update computes, since siblings share, of all", "computed", ".1%"),
    ("share of the device's peak, by what is computed", "share_of_peak", ".1%"),
    ("publishing by tensors, s", "publish_tensors_s", ".2f"),
    ("publishing by disk, s", "publish_disk_s", ".2f"),
    ("publishing by a process group, s", "publish_group_s", ".2f"),
    ("logprob difference, mean", "mismatch_mean", ".2g"),
    ("logprob difference, maximum", "mismatch_max", ".2g"),
    ("GPU idle during rollouts", "idle_rolling_out", ".0%"),
    ("GPU idle during updates", "idle_learning", ".0%"),
    ("GPU idle while publishing, by each way in turn", "idle_publishing", ".0%"),
)


def check_bars(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The bars with their values; a part that failed or never ran misses its bar."""
    values = [results.get(part, {}).get(figure) for part, figure, _, _ in BARS]
    return [
        {"part": part, "figure": description, "bar": bar, "value": value, "met": value is not None and value >= bar}
        for (part, _, description, bar), value in zip(BARS, values, strict=True)
    ]


def format_results(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [f"{name}: {value}  " for name, value in results["about"].items()]
    lines += ["", *format_figures(results), ""]
    lines += [f"not measured: {item}  " for item in results.get("left_out", ())]
    parts = [(name, part) for name, part in results.items() if isinstance(part, dict)]
    lines += [f"{name}: {part[key]}  " for name, part in parts for key in ("problem", "trl_problem") if key in part]
    return "\n".join(["# On a GPU", "", *lines]) + "\n"


def format_figures(results: Mapping[str, Any]) -> Iterator[str]:
    """The table of figures, as on the results page."""
    names = [name for name, part in results.items() if isinstance(part, dict) and "rollout_tokens_per_s" in part]
    yield from (f"| | {' | '.join(names)} |", "|---|" + "--:|" * len(names))
    for title, key, number_format in ROWS:
        cells = (results[name].get(key) for name in names)
        yield f"| {title} | {' | '.join('' if cell is None else format(cell, number_format) for cell in cells)} |"
    yield from _format_bars(results.get("bars", ()))


def _format_bars(bars: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Nothing for a small run, which has no bars."""
    if bars:
        yield from ("", "| promise | measured | |", "|---|--:|---|")
    for bar in bars:
        value = "nothing" if bar["value"] is None else f"{bar['value']:.1%}"
        verdict = "met" if bar["met"] else "**missed**"
        yield f"| {bar['part']}: {bar['figure']} >= {bar['bar']:.0%} | {value} | {verdict} |"
