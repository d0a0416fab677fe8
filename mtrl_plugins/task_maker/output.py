"""Writes what `make-tasks` made: tasks for training, tasks held out, a run file, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError
from mtrl_plugins.task_maker.make_tasks import MadeTask, TaskMaker, count_shared_values
from mtrl_plugins.task_maker.server_sessions import MAX_RESULT, Server

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
"""
"""The run file beside the tasks."""
EVALUATION = "evaluation: {{data: {held_out}, every: 10, rows: 50, final_rows: 300}}\n"
"""Its last line, where tasks are held out."""


def held_out_file(out: Path) -> Path:
    """The file of the held-out tasks."""
    return out.with_name(f"{out.stem}.held_out{out.suffix}")


def write_tasks(out: Path, made: Sequence[MadeTask], server: Server, mcp: Path) -> list[Path]:
    """Writes the files; returns their paths. Without held-out tasks there is no file of them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    run_file, files = out.with_suffix(".yaml"), {"train": out, "held_out": held_out_file(out)}
    has_held_out = any(task.chain.split == "held_out" for task in made)
    if not has_held_out:
        del files["held_out"]
    for split, file in files.items():
        tasks = [task for task in made if task.chain.split == split]
        rows = (json.dumps(task.row(number, server), ensure_ascii=False) for number, task in enumerate(tasks))
        write_atomically(file, "".join(f"{row}\n" for row in rows).encode())
    turns = max(task.chain.level for task in made) + 3
    values = {"name": server.name, "file": run_file, "data": out, "held_out": held_out_file(out)}
    text = RUN_FILE + EVALUATION if has_held_out else RUN_FILE
    text = text.format(**{key: format_yaml(value) for key, value in values.items()}, mcp=format_yaml(mcp), turns=turns)
    write_atomically(run_file, text.encode())
    return [*files.values(), run_file]


def format_yaml(value: object) -> str:
    """A path or number as YAML."""
    text = str(value)
    return text if all(character.isalnum() or character in "./_-" for character in text) else json.dumps(text)


def check_output(out: Path, *, is_folder: bool = False) -> None:
    """Raises ConfigError if one of the files exists already, or the folder of Harbor tasks."""
    for file in (out, out.with_suffix(".yaml"), *(() if is_folder else [held_out_file(out)])):
        if file.exists():
            raise ConfigError("already exists", file=file, field="--out", remedy="name another one, or remove it")
    if is_folder and out.suffix:
        raise ConfigError(
            f"is {out.name!r}", field="--out", remedy="Harbor tasks are folders: name one for them, tasks"
        )
    if out.suffix == ".yaml":
        raise ConfigError(f"is {out.name!r}", field="--out", remedy="tasks are lines of JSON: name it tasks.jsonl")


def format_report(maker: TaskMaker, seconds: float) -> str:
    """The report as Markdown."""
    return "\n".join(_report_lines(maker, seconds)) + "\n"


def _report_lines(maker: TaskMaker, seconds: float) -> Iterator[str]:
    report, server = maker.report, maker.server
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
    yield f"Values that held-out and training tasks share: {count_shared_values(maker.made)}."
    if not server.has_folder:
        yield "The server has no folder of its own, so that only answers are graded."
    if unused := maker.unused_tools:
        yield f"Not used, since their results have more than {MAX_RESULT:,} characters: {', '.join(unused)}."
    if limit := maker.describe_limit():
        yield limit


def _count_table(title: str, counts: Iterable[tuple[str, int]]) -> Iterator[str]:
    rows = [f"| {name} | {count} |" for name, count in counts]
    if rows:
        yield from (f"| {title} | |", "|---|--:|", *rows, "")
