"""The GPU benchmark's lines as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OWN = ("part", "figure", "value", "unit", "at_s", "skipped")


def format_figures(lines: Sequence[Mapping[str, Any]]) -> str:
    """Date, card, versions and command; the figures, part by part; what failed or was skipped, and why."""
    about = next((line["about"] for line in lines if "about" in line), {})
    rows = [f"{name}: {value}  " for name, value in about.items()]
    rows += ["", "| part | figure | value |", "|---|---|--:|"]
    rows += [
        f"| {line['part']} | {line['figure']}{_labels(line)} | {_value(line)} |" for line in lines if "value" in line
    ]
    without = [line for line in lines if "skipped" in line or "failed" in line]
    rows += ["", "| part | not measured | why |", "|---|---|---|"] if without else []
    for line in without:
        figure = f"{line.get('figure', 'all of it' if 'skipped' in line else 'the rest')}{_labels(line)}"
        why = " ".join(str(line.get("skipped") or line.get("failed")).split())[:300].replace("|", "\\|")
        rows.append(f"| {line['part']} | {figure} | {why} |")
    return "\n".join(rows)


def _labels(line: Mapping[str, Any]) -> str:
    named = [f"{name.replace('_', ' ')} {value}" for name, value in line.items() if name not in (*OWN, "failed")]
    return f" ({', '.join(named)})" if named else ""


def _value(line: Mapping[str, Any]) -> str:
    value = line["value"]
    text = f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return f"{text} {line['unit']}".strip()
