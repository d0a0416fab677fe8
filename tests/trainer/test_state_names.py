"""Names of prepared states in rows, checked against a real server and sandbox before a run begins."""

from __future__ import annotations

import json
from pathlib import Path

import anyio

from gateway.gateway import Gateway
from mtrl_plugins.demo.shelves.shelves_demo import FOLDER
from tests.trainer.cli_data import RunCommand
from tests.trainer.train.trainings import write_config
from tests.waiting import PATIENCE_S
from trainer.data.state_names import check_state_names
from trainer.data.tasks import load_rows

ROWS = [
    {"prompt": "x"},
    {"prompt": "x", "state": "full"},
    {"prompt": "x", "state": "ful"},
    {"prompt": "y", "state": "ful"},
]


def write_servers(folder: Path, **settings: str) -> Path:
    """The server of shelves, with a folder of states of which one is `full`."""
    (folder / "states" / "full").mkdir(parents=True, exist_ok=True)
    entry = json.loads((FOLDER / "servers.json").read_text())["mcpServers"]["shelves"] | {"cwd": str(FOLDER)}
    entry.pop("state")
    file = folder / "mcp_servers.json"
    file.write_text(json.dumps({"mcpServers": {"shelves": entry | settings}}))
    return file


async def problems(rows: list[dict[str, object]], tools: Path | None, servers: Path | None) -> list[str]:
    with anyio.fail_after(PATIENCE_S):
        async with Gateway.load(tools, servers) as gateway:
            return [str(error) for error in check_state_names(load_rows(rows), gateway)]


async def test_state_that_the_server_has_not_is_named_by_row_with_the_closest_one(tmp_path: Path) -> None:
    servers = write_servers(tmp_path, states=str(tmp_path / "states"))
    told = await problems(ROWS, None, servers)
    assert told == [
        f"rows:3: state: shelves: there is no state 'ful' in {tmp_path / 'states'}; there are: full"
        " (1 more row names it)\n"
        "  remedy: did you mean 'full'?"
    ]


def test_dry_run_names_the_row(run: RunCommand) -> None:
    write_config(data="t.jsonl")
    Path("tools/states/full").mkdir(parents=True)
    Path("tools/box.yaml").write_text("tools:\n  - sandbox_tools: [files]\n    states: states\n")
    Path("t.jsonl").write_text("".join(json.dumps(row | {"ground_truth": "7"}) + "\n" for row in ROWS))
    output = run("--config", "run.yaml", "--dry-run", code=2).output
    assert "t.jsonl:3: state: sandbox: there is no state 'ful'" in output and "did you mean 'full'?" in output
