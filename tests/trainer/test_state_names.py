"""Names of prepared states in rows, checked against a real server and sandbox before a run begins."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

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


async def test_state_outside_of_the_folder_is_refused_and_rows_for_other_tools_are_left_alone(tmp_path: Path) -> None:
    servers = write_servers(tmp_path, states=str(tmp_path / "states"))
    rows: list[dict[str, object]] = [{"prompt": "x", "state": "../full"}, {"prompt": "y", "state": "ful", "tools": []}]
    told = await problems(rows, None, servers)
    assert len(told) == 1 and "rows:1: state: shelves: '../full' is not the name of a state" in told[0]


@pytest.mark.parametrize("extra", [{"end_state": {"shelves": "sha256:0"}}, {}])
async def test_state_where_no_server_has_states_is_told_if_it_is_meant_as_one(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    """Without `end_state` or a `state` of the server, the column may be the user's own, such as one of Texas."""
    told = await problems([{"prompt": "x", "state": "Texas", **extra}], None, write_servers(tmp_path))
    assert bool(told) == bool(extra) and all("give the server or sandbox `states`" in text for text in told)
    with_default = write_servers(tmp_path, state=str(tmp_path / "states" / "full"))
    assert await problems([{"prompt": "x", "state": "Texas", **extra}], None, with_default)


async def test_states_of_sandboxes_are_checked(tmp_path: Path) -> None:
    (tmp_path / "tools" / "states" / "full").mkdir(parents=True)
    (tmp_path / "tools" / "box.yaml").write_text("tools:\n  - sandbox_tools: [files]\n    states: states\n")
    told = await problems(ROWS, tmp_path / "tools", None)
    assert len(told) == 1 and "rows:3: state: sandbox: there is no state 'ful'" in told[0]


@pytest.mark.parametrize(
    "words", [("check", "--tools", "tools", "--data", "t.jsonl"), ("--config", "run.yaml", "--dry-run")]
)
def test_check_and_dry_run_name_the_row(run: RunCommand, words: tuple[str, ...]) -> None:
    write_config(data="t.jsonl")
    Path("tools/states/full").mkdir(parents=True)
    Path("tools/box.yaml").write_text("tools:\n  - sandbox_tools: [files]\n    states: states\n")
    Path("t.jsonl").write_text("".join(json.dumps(row | {"ground_truth": "7"}) + "\n" for row in ROWS))
    output = run(*words, code=1 if "check" in words else 2).output
    assert "t.jsonl:3: state: sandbox: there is no state 'ful'" in output and "did you mean 'full'?" in output
