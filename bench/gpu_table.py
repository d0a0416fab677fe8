"""What was found on a GPU, for people to read: a table, and whether each promise was kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

JOB, TURNS = "default job", "default job, taking turns"
BARS = (
    (JOB, "greedy", "success on held-out tasks", 0.9),
    ("Qwen2.5-0.5B", "of_plain", "of SGLang's own tokens/s", 0.95),
    ("Qwen2.5-1.5B", "of_plain", "of SGLang's own tokens/s", 0.95),
)
"""Part, figure, what that is, and what it must come to."""
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
    ("logprobs apart, mean", "mismatch_mean", ".2g"),
    ("logprobs apart, most", "mismatch_max", ".2g"),
    ("GPU idle while rolling out", "idle_rolling_out", ".0%"),
    ("GPU idle while learning", "idle_learning", ".0%"),
    ("GPU idle while publishing, by each way in turn", "idle_publishing", ".0%"),
)


def judged(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A part that failed, or was never begun, has met nothing."""
    found = [told.get(part, {}).get(figure) for part, figure, _, _ in BARS]
    return [
        {"part": part, "figure": what, "bar": bar, "value": value, "met": value is not None and value >= bar}
        for (part, _, what, bar), value in zip(BARS, found, strict=True)
    ]


def table(told: Mapping[str, Any]) -> str:
    lines = [f"{name}: {value}  " for name, value in told["about"].items()]
    lines += ["", *figures(told), ""]
    lines += [f"left out: {what}  " for what in told.get("left_out", ())]
    parts = [(name, one) for name, one in told.items() if isinstance(one, dict)]
    lines += [f"{name}: {one[key]}  " for name, one in parts for key in ("problem", "trl_problem") if key in one]
    return "\n".join(["# On a GPU", "", *lines]) + "\n"


def figures(told: Mapping[str, Any]) -> Iterator[str]:
    """As they stand in the README as well."""
    names = [name for name, one in told.items() if isinstance(one, dict) and "rollout_tokens_per_s" in one]
    yield from (f"| | {' | '.join(names)} |", "|---|" + "--:|" * len(names))
    for title, key, form in ROWS:
        cells = (told[name].get(key) for name in names)
        yield f"| {title} | {' | '.join('' if cell is None else format(cell, form) for cell in cells)} |"
    yield from _promises(told.get("bars", ()))


def _promises(bars: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """None are judged of what was done in small."""
    if bars:
        yield from ("", "| promise | found | |", "|---|--:|---|")
    for one in bars:
        found = "nothing" if one["value"] is None else f"{one['value']:.1%}"
        kept = "met" if one["met"] else "**missed**"
        yield f"| {one['part']}: {one['figure']} >= {one['bar']:.0%} | {found} | {kept} |"
