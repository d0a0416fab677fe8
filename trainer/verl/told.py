"""What became of each key, for a person; the settings, as a run file; and the table, as the guide has it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.verl.row import How, Table
from trainer.verl.table import VERL
from trainer.verl.translate import Became, Translation

HEADS = (
    (How.SAME, "The same here"),
    (How.BETTER, "Otherwise here, and why"),
    (How.REFUSED, "As it has to be here"),
    (How.IDLE, "Nothing to set"),
)
PLAIN = re.compile(r"[A-Za-z_][\w./ -]*")
WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "none"})


def report(found: Translation) -> str:
    """Each key that was written, under what became of it."""
    parts = [_part(title, [one for one in found.became if one.row.how is how]) for how, title in HEADS]
    beside = "\n".join(f"  {ours}: {_scalar(value)} - {why}" for ours, (value, why) in found.table.beside.items())
    return "\n\n".join([*(part for part in parts if part), f"Set beside\n{beside}"])


def _part(title: str, became: list[Became]) -> str:
    return "\n".join([title, *(f"  {_line(one)}" for one in became)]) if became else ""


def _line(one: Became) -> str:
    ours = f" -> {one.row.ours}: {_flow(one.value)}" if one.row.ours and one.value is not None else ""
    why = f" - {one.row.why}" if one.row.why and one.row.how is not How.REFUSED else ""
    return f"{one.key}{ours} ({one.place}){why}"


def run_file(found: Translation) -> str:
    """The settings as YAML, each with the key that it comes from."""
    head = f"# Translated from {found.table.of}'s configuration; run it with `mtrl-train --config FILE`.\n"
    return head + "\n".join(_lines(found.settings, found.sources)) + "\n"


def _lines(tree: Mapping[str, Any], sources: Mapping[str, str], above: str = "") -> Iterator[str]:
    indent = "  " * above.count(".")
    for name, value in tree.items():
        ours = f"{above}{name}"
        source = f"  # {sources[ours]}" if ours in sources else ""
        whole = ours in sources and not any(other.startswith(f"{ours}.") for other in sources)
        if isinstance(value, dict) and value and not whole:
            yield f"{indent}{name}:{source}"
            yield from _lines(value, sources, f"{ours}.")
        else:
            yield f"{indent}{name}: {_flow(value)}{source}"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(name)}: {_flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """As YAML reads it back."""
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value == value.strip() and value.lower() not in WORDS
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def table(shown: Table = VERL) -> str:
    """Markdown: theirs, ours, what changed and why."""
    rows = [f"| {shown.of} | mtrl | what changed, and why |", "|---|---|---|"]
    for row in shown.rows:
        names = ", ".join(f"`{name}`" for name in row.theirs)
        ours = f"`{row.ours}`" if row.ours else "-"
        how = "" if row.how is How.SAME else f"{row.how}: " if row.why else f"{row.how}"
        default = "" if row.default is None else f" (there {_flow(row.default)} by default)"
        rows.append(f"| {names} | {ours} | {how}{row.why.replace('|', chr(92) + '|')}{default} |")
    return "\n".join(rows)
