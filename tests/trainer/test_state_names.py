"""Names of prepared states in rows, checked against a real server and sandbox before a run begins."""

from __future__ import annotations

import json
from pathlib import Path

from mtrl_plugins.demo.shelves.shelves_demo import FOLDER
from tests.trainer.cli_data import RunCommand
from tests.trainer.train.trainings import write_config

ROWS = [
    {"prompt": "x"},
    {"prompt": "x", "state": "full"},
    {"prompt": "x", "state": "ful"},
    {"prompt": "y", "state": "ful"},
]


def test_state_that_a_server_or_a_sandbox_has_not_is_named_by_row_with_the_closest_one(
    run: RunCommand, place: Path
) -> None:
    server = json.loads((FOLDER / "servers.json").read_text())["mcpServers"]["shelves"]
    del server["state"]
    server |= {"cwd": str(FOLDER), "states": str(place / "tools/states")}
    Path("mcp_servers.json").write_text(json.dumps({"mcpServers": {"shelves": server}}))
    write_config(data="t.jsonl", mcp="mcp_servers.json")
    Path("tools/states/full").mkdir(parents=True)
    Path("tools/box.yaml").write_text("tools:\n  - sandbox_tools: [files]\n    states: states\n")
    Path("t.jsonl").write_text("".join(json.dumps(row | {"ground_truth": "7"}) + "\n" for row in ROWS))
    output = run("--config", "run.yaml", "--dry-run", code=2).output
    for source in ("shelves", "sandbox"):
        assert f"t.jsonl:3: state: {source}: there is no state 'ful'" in output
    assert output.count("(1 more row names it)") == output.count("did you mean 'full'?") == 2
