"""Every block of docs/migration-trl.md does what it says, and so does every cell of its notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.conftest import Follow
from tests.trainer.train import jobs
from trainer.storage.run_files import read_metrics

NOTEBOOK = ROOT / "docs" / "trl.ipynb"


def test_migration_trl_page(follow: Follow) -> None:
    done = follow("docs/migration-trl.md", no_servers=True)
    steps = [json.loads(line) for line in Path("runs/moved/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all({"reward/correct", "reward/looked_up"} <= step.keys() and not step["reward/failed"] for step in steps)
    assert "price" in done["mtrl-train show"] and "looked_up 0" in done["mtrl-train show"]


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cells(cells: list[str]) -> None:
    """Runs cells one after the other in one namespace, with fewer steps."""
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell.replace("max_steps=10", "max_steps=2"), f"cell {number}", "exec"), names)


async def test_the_notebook_runs_where_an_event_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Jupyter, cells run in the thread of a running loop. A model that was trained before stands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtrl_plugins.demo.demos.Demo.prepare_model", lambda *_: jobs.demo_model())
    run_cells(code_cells(NOTEBOOK))
    printed = capsys.readouterr().out
    assert "How many people live in Lima? 49489" in printed and "2 Qwen3ForCausalLM" in printed
    steps = read_metrics(tmp_path / "runs" / "notebook" / "metrics.jsonl")
    assert len(steps) == 2 and all(step["reward/looked_up"] > 0 < step["logged/most_calls"] for step in steps)
