"""The table of `bench/scale_up.py`: ratios of each part, and which promises are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Promise = tuple[str, str, bool]
"""What was promised, what was measured, and whether it is met."""


def check_promises(content: Mapping[str, Any]) -> list[Promise]:
    """All promises; those of a part without results are missed."""
    promises = [(f"the part {name!r} is measured", part["problem"], False) for name, part in _parts(content, "problem")]
    promises += [(f"the part {name!r} is measured", "not run", False) for name in SECTIONS if name not in content]
    found = {name: part["found"] for name, part in _parts(content, "found")}
    promises += [(text, value, kept) for text, value, kept in found.get("workers", {}).get("promises", ())]
    return promises


def _parts(content: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, content[name]) for name in SECTIONS if key in content.get(name, {})]


def format_results(content: Mapping[str, Any]) -> str:
    """The results as Markdown, in ratios alone: seconds are the machine's."""
    lines = ["# Scaling: more processes, in ratios"]
    for name, (title, format_part) in SECTIONS.items():
        if part := content.get(name):
            about = part["about"]
            lines += ["", f"## {title}", "", f"{about['date']}, {about['machine']}; {about['versions']}", ""]
            lines += (
                format_part(part["found"])
                if "found" in part
                else [f"Not measured: {' '.join(part['problem'].split())}"]
            )
    lines += ["", "## Promises", "", "| promise | measured | |", "|---|--:|---|"]
    for text, value, is_kept in check_promises(content):
        lines.append(f"| {text} | {' '.join(value.split())} | {'met' if is_kept else '**missed**'} |")
    return "\n".join(lines) + "\n"


def _format_ranks(rows: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """A step of some ranks, and what the cores allow, as multiples of a step of one rank."""
    one = next(row for row in rows if row["ranks"] == 1)["step_s"]
    yield "| ranks | a step, of one rank's | without any exchange | share of what the cores allow |"
    yield "|--:|--:|--:|--:|"
    for row in rows:
        yield f"| {row['ranks']} | {row['step_s'] / one:.2f} | {row['floor_s'] / one:.2f} | {row['ratio']:.2f} |"


def _format_workers(found: Mapping[str, Any]) -> Iterator[str]:
    """Turns and their processor time against one worker, and memory of a rollout against that of fewer."""
    yield "All numbers of workers take turns for some rounds, and the best round of each counts."
    yield ""
    yield "| engine | workers | turns/s, of one worker's | CPU of a turn, of one worker's | training process's part |"
    yield "|---|--:|--:|--:|--:|"
    for engine, key in (("answers at once", "paces"), ("takes a second for a turn", "paced")):
        one = next(pace for pace in found[key] if pace["workers"] == 1)
        for pace in found[key]:
            cost, turns = _cpu_ms(pace) / _cpu_ms(one), pace["turns_per_s"] / one["turns_per_s"]
            part = pace["trainer_ms"] / _cpu_ms(pace)
            yield f"| {engine} | {pace['workers']} | {turns:.2f} | {cost:.2f} | {part:.0%} |"
    yield ""
    yield "| workers | rollouts under way | memory of one, of that with fewer under way |"
    yield "|--:|--:|--:|"
    first: dict[int, float] = {}
    for row in found["kib"]:
        few = first.setdefault(row["workers"], row["kib"])
        yield f"| {row['workers']} | {row['rollouts']:,} | {row['kib'] / max(1e-9, few):.2f} |"


def _cpu_ms(pace: Mapping[str, float]) -> float:
    return pace["trainer_ms"] + pace["worker_ms"]


def _format_publish(found: Mapping[str, Any]) -> Iterator[str]:
    """Adapters alone as a share of merged weights."""
    alone, merged = found["adapters"], found["merged"]
    size = f"{found['parameters'] / 1e6:.0f}M parameters"
    yield f"LoRA adapters alone against merged weights, for an SGLang server; {size}."
    yield ""
    yield "| | adapters, of merged |"
    yield "|---|--:|"
    for title, key in (("bytes", "megabytes"), ("time of a publish", "publish_s"), ("tokens/s", "tokens_per_s")):
        yield f"| {title} | {alone[key] / merged[key]:.2f} |"


SECTIONS: Mapping[str, tuple[str, Callable[[Any], Iterator[str]]]] = {
    "ranks": ("Ranks", _format_ranks),
    "workers": ("Rollout workers", _format_workers),
    "publish": ("Ways to publish", _format_publish),
}
"""Titles of the parts, and what formats their results."""
