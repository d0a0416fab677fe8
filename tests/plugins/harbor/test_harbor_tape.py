"""Rollouts of Harbor tasks are recorded, and replayed by the command where no box can be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.sandbox.provider import BubblewrapProvider
from tests.conftest import Write
from tests.plugins.harbor.harbor_tasks import SAMPLES, write_task
from tests.trainer.cli_data import RunCommand

RUN = """
model: {model}
environment: {{name: "harbor:tasks", sandbox: {{memory_mb: 256, disk_mb: 16}}}}
limits: {{turn_tokens: 8, rollout_tokens: 2000}}
"""


def test_tape_is_replayed_without_boxes(
    model: Path, run: RunCommand, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(Path("tasks"), SAMPLES[0])
    write("run.yaml", RUN.format(model=model))
    run("rollout", "--config", "run.yaml", "--out", "runs/x", "--n", "2", "--record", "--engine", "torch")
    monkeypatch.setattr(BubblewrapProvider, "start", lambda *_, **__: pytest.fail("a box was started"))
    assert "2 rollouts replayed, 0 of them differ" in run("replay", "runs/x").output
