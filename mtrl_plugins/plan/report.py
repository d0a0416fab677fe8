"""A plan for the terminal, and as JSON: the recommendation first, then the splits, then memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.plural import format_count
from mtrl_plugins.plan.choose_split import MODES, PlannedSplit
from mtrl_plugins.plan.plan_run import PlannedRun
from mtrl_plugins.plan.speeds import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from trainer.policy.memory_parts import GIB

COLUMNS = ("mode", "train", "serve", "step s", "engine idle", "trainer idle", "tokens/s", "stale")
ASSUMED = (
    f"expected of the peak: {COMPUTE_EFFICIENCY:.0%} of the arithmetic, {BANDWIDTH_EFFICIENCY:.0%} of the memory"
    " bandwidth; nothing of this was measured on such a device"
)


def print_plan(planned: PlannedRun, console: Console) -> None:
    """Prints a plan."""
    plan = planned.plan
    console.print(Text(recommendation(planned), style="bold"))
    console.print(Text(f"drawn from {planned.workload}\n"))
    console.print(_table("the best split of each mode", [best for mode in MODES if (best := plan.best(mode))], planned))
    mode = plan.recommended.split.mode
    of_mode = [each for each in plan.splits if each.split.mode == mode]
    if len(of_mode) > 1:
        console.print(_table(f"splits of `mode: {mode}`", of_mode, planned))
    best = plan.recommended
    for name, memory in (("each rank", best.rank), ("each device of a server", best.server)):
        parts = ", ".join(f"{part.name} {part.size / GIB:.2f}" for part in memory.parts)
        console.print(Text(f"{name}: {memory.needed / GIB:.1f} of {memory.available / GIB:.1f} GiB: {parts}"))
    if any(each.part < 1 for each in plan.splits):
        console.print(Text("~ compared by a part of the job; the recommended split was simulated in full"))
    for note in (*planned.notes, ASSUMED):
        console.print(Text(f"note: {note}"))


def recommendation(planned: PlannedRun) -> str:
    """The best split as a sentence."""
    best, options = planned.plan.recommended, planned.options
    split, simulation = best.split, best.simulation
    if split.is_together:
        how = f"all {options.gpus} {options.device} generate and train by turns"
    else:
        how = f"{split.trainer} of {options.gpus} {options.device} train, {split.servers * options.tp} generate"
    versions = format_count(simulation.staleness, "version")
    ahead = f"; tokens are at most {versions} old" if simulation.staleness else ""
    return (
        f"Fastest: `mode: {split.mode}`, {how}: {simulation.step_s:.3g} s a step, {best.tokens_per_s:,.0f} tokens/s;"
        f" engines idle {simulation.engine_idle:.0%}, trainer idle {simulation.trainer_idle:.0%}{ahead}."
    )


def plan_to_json(planned: PlannedRun) -> str:
    """A plan as one JSON object."""
    return json.dumps(
        {
            "devices": planned.options.gpus,
            "device": planned.options.device,
            "recommended": _to_dict(planned.plan.recommended, planned),
            "splits": [_to_dict(each, planned) for each in planned.plan.splits],
            "rollouts": planned.workload,
            "notes": list(planned.notes),
        }
    )


def _to_dict(planned: PlannedSplit, run: PlannedRun) -> dict[str, Any]:
    split, simulation = planned.split, planned.simulation
    return {
        "mode": split.mode,
        "trainer_devices": split.trainer,
        "servers": split.servers,
        "servers_tp": run.options.tp,
        "together": split.is_together,
        "step_s": simulation.step_s,
        "tokens_per_s": planned.tokens_per_s,
        "engine_idle": simulation.engine_idle,
        "trainer_idle": simulation.trainer_idle,
        "staleness": simulation.staleness,
        "groups_dropped": simulation.dropped,
        "rollouts_under_way": round(simulation.most_under_way / planned.part),
        "simulated_part": planned.part,
        "rank_bytes": planned.rank.needed,
        "server_bytes": planned.server.needed,
        "available_bytes": planned.rank.available,
    }


def _table(title: str, rows: list[PlannedSplit], planned: PlannedRun) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=column == "mode")
    for row in rows:
        style = "bold" if row is planned.plan.recommended else None
        table.add_row(*_cells(row, planned.options.tp), style=style)
    return table


def _cells(row: PlannedSplit, tp: int) -> Iterator[str]:
    split, simulation = row.split, row.simulation
    yield split.mode
    yield "all" if split.is_together else str(split.trainer)
    yield "all" if split.is_together else f"{split.servers}" + (f" x {tp}" if tp > 1 else "")
    yield f"{'~' if row.part < 1 else ''}{simulation.step_s:.3g}"
    yield f"{simulation.engine_idle:.0%}"
    yield f"{simulation.trainer_idle:.0%}"
    yield f"{row.tokens_per_s:,.0f}"
    dropped = f" ({simulation.dropped} dropped)" if simulation.dropped else ""
    yield f"{simulation.staleness}{dropped}"
