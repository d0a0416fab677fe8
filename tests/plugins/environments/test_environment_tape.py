"""Rollouts on an environment are recorded, and replayed by the command where nothing is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrl_plugins.environments.host_process import stop_hosts
from tests.conftest import Write
from tests.plugins.environments.environment_runs import GYM_PYTHON
from trainer.cli import app

RUN = """
model: {model}
environment: {{name: "{environment}", python: {python}, n_tasks: 2, max_steps: 3}}
limits: {{turn_tokens: 8, rollout_tokens: 2000}}
"""


@pytest.mark.parametrize(
    ("environment", "python"), [("gymnasium:FrozenLake-v1", str(GYM_PYTHON)), ("textarena:Guess-v0", sys.executable)]
)
def test_tape_is_replayed_with_nothing_installed(
    environment: str, python: str, model: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_here = Path("python")
    python_here.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    python_here.chmod(0o755)
    write("run.yaml", RUN.format(model=model, environment=environment, python=f"./{python_here}"))
    command = ["rollout", "--config", "run.yaml", "--out", "runs/x", "--n", "2", "--record", "--engine", "torch"]
    recorded = CliRunner().invoke(app, command)
    assert recorded.exit_code == 0, recorded.output
    stop_hosts()
    python_here.unlink()
    monkeypatch.delenv("PYTHONPATH")
    replayed = CliRunner().invoke(app, ["replay", "runs/x"])
    assert replayed.exit_code == 0, replayed.output
    assert "4 rollouts replayed, 0 of them differ" in replayed.output
