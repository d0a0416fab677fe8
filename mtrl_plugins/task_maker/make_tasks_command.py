"""The command `make-tasks`."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.cli.errors import report_errors
from trainer.cli.options import app

if TYPE_CHECKING:
    from rich.console import Console

    from mtrl_plugins.task_maker.make_tasks import MakeSettings, TaskMaker


@app.command("make-tasks")
def make_tasks(
    mcp: Annotated[Path, typer.Option(metavar="FILE", help="MCP servers file")],
    server: Annotated[str, typer.Option(metavar="NAME", help="The server in it that tasks are made from")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Training tasks; held-out ones and a run file beside it")],
    n: Annotated[int, typer.Option("--n", min=1, help="Number of tasks, held-out ones included")] = 500,
    levels: Annotated[str, typer.Option(metavar="N,N,...", help="Levels: how many calls a task needs")] = "1,2,3",
    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of held-out tasks")] = 0.2,
    seed: Annotated[int, typer.Option(help="The same seed gives the same tasks")] = 0,
    state: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the server's `states`. Default: all of them, or `state`")
    ] = None,
    tool: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Use this tool only; may be repeated")] = None,
    examples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Arguments that no schema tells, such as SQL: see below")
    ] = None,
    harbor: Annotated[
        str, typer.Option(metavar="URL", help="Write a folder of Harbor tasks; their server is at URL")
    ] = "",
) -> None:
    """Make verifiable tasks from an MCP server, without a judge or a key.

    Chains of calls are explored in fresh states and executed twice; those whose results or end states differ are
    dropped. Tasks are graded by the state at the end, or by a value of the last result. None is solved by doing nothing
    or by one of the random calls that are tried. Held-out tasks share no value with training tasks.

    The server needs `"isolation": "process"` (or `sandbox`) and, for grades by state, `${MTRL_ROLLOUT_DIR}` where it
    keeps its files; `"state": FOLDER` is what they begin with.

    mtrl-train make-tasks --mcp mcp_servers.json --server notes --n 20 --out trial.jsonl         a look at its tasks

    mtrl-train make-tasks --mcp mcp_servers.json --server notes --n 500 --out tasks.jsonl

    mtrl-train --config tasks.yaml --model MODEL_FOLDER          trains on them

    A task costs four to eight starts of the server: 500 tasks take about 10 minutes with one in Node.js, and 30 with
    one in Python, on two cores. Ctrl-C writes the tasks that were made until then.

    mtrl-train make-tasks --mcp mcp_servers.json --server notes --out tasks --harbor http://127.0.0.1:8000/mcp

    The last writes Harbor tasks, for the same server where `mtrl-gateway serve --mcp mcp_servers.json` has it: each
    session there begins anew. A value in a file grades them; tasks that a state grades are left out.

    Lines of --examples are {"tool": "find", "arguments": {"query": "SELECT city FROM people WHERE name='{name}'"}}:
    {name} is a known value of that key, {+name} a new word, {#count} a new number.
    """
    import anyio
    from rich.console import Console

    written: list[Path] = []
    with report_errors(stopped=lambda: _describe_stop(written)):
        anyio.run(_make, mcp, server, (out, harbor), _read_options(n, levels, held_out, seed, examples, harbor),
                  (state, tuple(tool or ())), Console(), written)  # fmt: skip


def _describe_stop(written: list[Path]) -> str:
    return f"the tasks so far are in {written[0]}" if written else "there are no tasks yet"


def _read_options(n: int, levels: str, held_out: float, seed: int, examples: Path | None, harbor: str) -> MakeSettings:
    from gateway.errors import ConfigError
    from mtrl_plugins.task_maker.make_tasks import MakeSettings
    from mtrl_plugins.task_maker.server_sessions import read_examples

    try:
        numbers = tuple(dict.fromkeys(int(level) for level in levels.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= level <= MAX_LEVEL for level in numbers):
        raise ConfigError(f"is {levels!r}", field="--levels", remedy=f"write numbers from 1 to {MAX_LEVEL}: 1,2,3")
    return MakeSettings(n, numbers, held_out, seed, read_examples(examples), answers_only=bool(harbor))


MAX_LEVEL = 12


async def _make(
    mcp: Path, name: str, out: tuple[Path, str], settings: MakeSettings, chosen: tuple[str | None, tuple[str, ...]],
    console: Console, written: list[Path],
) -> None:  # fmt: skip
    from mtrl_plugins.task_maker.harbor_output import check_harbor
    from mtrl_plugins.task_maker.make_tasks import TaskMaker
    from mtrl_plugins.task_maker.output import check_output
    from mtrl_plugins.task_maker.server_sessions import describe_server, open_server
    from trainer.view.progress import show_making

    check_output(out[0], is_folder=bool(out[1]))
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(open_server(mcp, name, *chosen))
        if out[1]:
            check_harbor(out[1], server)
        console.print(describe_server(server), markup=False)
        with show_making(console) as progress:
            maker = TaskMaker(server, settings, progress)
            stack.callback(lambda: _write(out, maker, mcp, time.monotonic() - started, console, written))
            await maker.make()


def _write(
    out: tuple[Path, str], maker: TaskMaker, mcp: Path, seconds: float, console: Console, written: list[Path]
) -> None:
    """Writes the tasks that were made, also where an error or Ctrl-C ended the command."""
    from mtrl_plugins.task_maker.harbor_output import write_harbor_tasks
    from mtrl_plugins.task_maker.output import format_report, write_tasks

    if not maker.made:
        return
    path, url = out
    made = (path, maker.made, maker.server, mcp)
    written += write_harbor_tasks(*made, url) if url else write_tasks(*made)
    console.print(format_report(maker, seconds), markup=False)
    console.print(f"written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)
    console.print(
        f"train on them with: mtrl-train --config {written[-1]} --model MODEL_FOLDER", markup=False, soft_wrap=True
    )
