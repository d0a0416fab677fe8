"""A run on each framework is recorded, and replayed once its interpreter and its server are gone."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from anyio import to_thread
from typer.testing import CliRunner

from mtrl_plugins.environments.host_process import stop_hosts
from tests.conftest import Write
from tests.environments.real_environments import open_vault, python_of
from tests.plugins.environments.test_environment_tape import RUN
from tests.trainer.model_folders import save_tiny_model
from trainer.cli import app

ENVIRONMENTS = {
    "gymnasium": "gymnasium:FrozenLake-v1",
    "textarena": "textarena:GuessTheNumber-v0",
    "openenv": "openenv:",
    "verifiers-v0": "verifiers:shop_env",
    "verifiers": "verifiers:market_taskset",
}
"""By the name of the interpreter."""
RECORD = ["rollout", "--config", "run.yaml", "--out", "runs/x", "--n", "2", "--record", "--engine", "torch"]


def make_link(file: Path, python: str) -> None:
    """A program that is another Python, until it is deleted."""
    file.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    file.chmod(0o755)


@pytest.mark.parametrize("interpreter", ENVIRONMENTS)
async def test_tape_is_replayed_with_nothing_installed(
    interpreter: str, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "empty"))
    python_here = tmp_path / "python"
    async with AsyncExitStack() as stack:
        environment, text = ENVIRONMENTS[interpreter], RUN
        if interpreter == "openenv":
            environment += (await stack.enter_async_context(open_vault()))[1]
            text = text.replace("python: {python}, ", "")
        else:
            make_link(python_here, python_of(interpreter))
        if environment.startswith("verifiers:"):
            text = text.replace("n_tasks: 2, max_steps: 3", "rows: 2")
        model = save_tiny_model(tmp_path / "model")
        given = {"model": model, "environment": environment}
        write("run.yaml", text.format(**given, python=python_here))
        recorded = await to_thread.run_sync(lambda: CliRunner().invoke(app, RECORD))
        assert recorded.exit_code == 0, recorded.output
        stop_hosts()
    await to_thread.run_sync(lambda: python_here.unlink(missing_ok=True))
    monkeypatch.delenv("PYTHONPATH")
    replayed = await to_thread.run_sync(lambda: CliRunner().invoke(app, ["replay", "runs/x"]))
    assert replayed.exit_code == 0, replayed.output
    assert "4 rollouts replayed, 0 of them differ" in replayed.output
