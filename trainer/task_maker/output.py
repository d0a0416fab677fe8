"""Writes what `make-tasks` made: tasks for training, tasks held out, a run file, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gateway.disk_errors import write_atomically
from trainer.task_maker.make_tasks import MadeTask, Report
from trainer.task_maker.rewording import Rewording
from trainer.task_maker.server_sessions import Server

RUN_FILE = """\
# Trains on the tasks of the server `{name}`, made by `mtrl-train make-tasks`:
#   mtrl-train --config {file} --model MODEL_FOLDER
data: {data}
tools: []                            # only the server's tools
mcp: {mcp}
steps: 100
prompts: 16
n: 8
reward:
  components:
    solved: {{function: solved}}       # the end state, the answer, or both, as the row asks
limits: {{assistant_turns: {turns}, tool_calls: {turns}, turn_tokens: 512, rollout_tokens: 4096}}
algorithm: {{name: dapo}}
evaluation: {{data: {held_out}, every: 10, few: 50, rows: 300}}
"""
"""The run file beside the tasks."""


def held_out_file(out: Path) -> Path:
    """The file of the held-out tasks."""
    return out.with_name(f"{out.stem}.held_out{out.suffix}")


def write_tasks(out: Path, made: Sequence[MadeTask], server: Server, mcp: Path) -> list[Path]:
    """Writes the files; returns their paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files = {"train": out, "held_out": held_out_file(out)}
    for split, file in files.items():
        tasks = [task for task in made if task.chain.split == split]
        rows = (json.dumps(task.row(number, server), ensure_ascii=False) for number, task in enumerate(tasks))
        write_atomically(file, "".join(f"{row}\n" for row in rows).encode())
    turns = max(task.chain.level for task in made) + 3
    values = {"name": server.name, "file": out.with_suffix(".yaml"), "data": out, "mcp": mcp, "turns": turns}
    text = RUN_FILE.format(held_out=files["held_out"], **{key: _yaml(value) for key, value in values.items()})
    write_atomically(out.with_suffix(".yaml"), text.encode())
    return [out, files["held_out"], out.with_suffix(".yaml")]


def _yaml(value: object) -> str:
    """A path or number as YAML."""
    text = str(value)
    return text if all(character.isalnum() or character in "./_-" for character in text) else json.dumps(text)


def format_report(report: Report, server: Server, seconds: float, rewording: Rewording | None = None) -> str:
    """The report as Markdown."""
    return "\n".join(_report_lines(report, server, seconds, rewording)) + "\n"


def _report_lines(report: Report, server: Server, seconds: float, rewording: Rewording | None) -> Iterator[str]:
    yield f"{report.total} tasks of the server `{server.name}`, from {report.explored} chains, in {seconds:.0f} s."
    yield ""
    yield "| level (calls) | training | held out |"
    yield "|--:|--:|--:|"
    for level in sorted({level for level, _ in report.kept}):
        yield f"| {level} | {report.kept[level, 'train']} | {report.kept[level, 'held_out']} |"
    yield ""
    yield from _count_table("graded by", report.graded.most_common())
    yield from _count_table("chains dropped, because", report.dropped.most_common())
    yield from _count_table("calls by tool", report.tools.most_common())
    yield f"Values that held-out and training tasks share: {report.shared_values}."
    if not server.has_folder:
        yield "The server has no folder of its own, so that only answers are graded."
    if rewording is not None:
        yield f"Reworded: {rewording.taken}; refused: {rewording.refused}; no answer: {rewording.failed}."


def _count_table(title: str, counts: Iterable[tuple[str, int]]) -> Iterator[str]:
    rows = [f"| {name} | {count} |" for name, count in counts]
    if rows:
        yield from (f"| {title} | |", "|---|--:|", *rows, "")
