"""Digests of steps for the web UI: what their rollouts were, how they ended, and how long their tool calls took."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from mtrl_plugins.web.rollout_index import RolloutIndex

MAX_STEPS = 100
"""Steps in a response, the last ones of a range."""
MAX_VALUES = 50
"""Values shown of a property, the most frequent ones."""
PROPERTIES = ("kind", "source", "stop", "blame")
"""Properties of which a rollout has one value."""
COUNTED = {"tool": "tools", "outcome": "outcomes"}
"""Properties of which it can have several, and their columns."""
BINS = 12
MEASURES = ("reward", "success", "turns", "tokens", "written", "calls", "seconds")
COLUMNS = ", ".join(("place", "step", *PROPERTIES, *COUNTED.values(), *MEASURES))
Row = Mapping[str, Any]


def digest_steps(index: RolloutIndex, first: int, last: int) -> list[dict[str, Any]]:
    """The digests of the steps of a range, in order; of at most `MAX_STEPS`, the last of them."""
    steps_sql = "SELECT DISTINCT step FROM rollouts WHERE step BETWEEN ? AND ? ORDER BY step DESC LIMIT ?"
    steps = sorted(row["step"] for row in index.select(steps_sql, [first, last, MAX_STEPS]))
    if not steps:
        return []
    rows = _by_step(index.select(f"SELECT {COLUMNS} FROM rollouts WHERE step BETWEEN ? AND ?", [steps[0], last]))  # noqa: S608
    calls = _by_step(index.select("SELECT * FROM calls WHERE step BETWEEN ? AND ?", [steps[0], last]))
    return [_digest_step(step, rows[step], calls[step]) for step in steps]


def _by_step(rows: Iterable[Row]) -> Mapping[int, list[Row]]:
    grouped: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row["step"]].append(row)
    return grouped


def _digest_step(step: int, rows: Sequence[Row], calls: Sequence[Row]) -> dict[str, Any]:
    values = {name: _digest_values(rows, [[row[name]] if row[name] else [] for row in rows]) for name in PROPERTIES}
    for name, column in COUNTED.items():
        values[name] = _digest_values(rows, [[*json.loads(row[column] or "{}")] for row in rows])
    return {
        "step": step,
        "rollouts": len(rows),
        "scored": sum(row["reward"] is not None for row in rows),
        **{name: _mean(row[name] for row in rows) for name in MEASURES},
        "spreads": {name: spread for name in MEASURES if (spread := _spread([row[name] for row in rows]))},
        "values": values,
        "tools": _digest_calls(calls),
    }


def _digest_values(rows: Sequence[Row], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """By value: the rollouts that have it, the scored ones, their mean reward and success, and the worst of them."""
    grouped: defaultdict[str, list[Row]] = defaultdict(list)
    for row, values in zip(rows, names, strict=True):
        for value in values:
            grouped[value].append(row)
    frequent = sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0]))[:MAX_VALUES]
    return {
        value: {
            "rollouts": len(those),
            "scored": sum(row["reward"] is not None for row in those),
            "reward": _mean(row["reward"] for row in those),
            "success": _mean(row["success"] for row in those),
            "place": min(those, key=lambda row: (row["reward"] is not None, row["reward"] or 0.0, row["place"]))[
                "place"
            ],
        }
        for value, those in frequent
    }


def _digest_calls(calls: Sequence[Row]) -> dict[str, Any]:
    """By tool: its calls, their latency and outcomes, and the rollout of the slowest one."""
    grouped: defaultdict[str, list[Row]] = defaultdict(list)
    for call in calls:
        grouped[call["tool"]].append(call)
    return {tool: _digest_tool(those) for tool, those in sorted(grouped.items())[:MAX_VALUES]}


def _digest_tool(calls: Sequence[Row]) -> dict[str, Any]:
    timed = sorted((call["seconds"], call["place"]) for call in calls if call["seconds"] is not None)
    seconds = [value for value, _ in timed]
    return {
        "calls": len(calls),
        "outcomes": dict(Counter(call["outcome"] for call in calls).most_common(MAX_VALUES)),
        "times": {  # Nearest ranks, which are times of calls that were made.
            **{f"p{share}": seconds[ceil(len(seconds) * share / 100) - 1] for share in (50, 95) if seconds},
            **({"max": seconds[-1]} if seconds else {}),
        },
        "slowest": timed[-1][1] if timed else None,
    }


def _spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """A histogram; None if the values do not differ."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low == high:
        return None
    placed = Counter(min(BINS - 1, int((value - low) / (high - low) * BINS)) for value in known)
    return {"low": low, "high": high, "counts": [placed[place] for place in range(BINS)]}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
