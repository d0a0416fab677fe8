"""The shipped run files on small stand-ins of their models and data, and the JSON Schema that editors check them by."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from mtrl_plugins.environments.host_process import stop_hosts
from tests.plugins.environments.environment_runs import GYM_PYTHON, STAND_IN
from tests.plugins.verifiers.verifiers_runs import add_to_path
from tests.trainer.model_folders import save_tiny_model
from tests.trainer.train.jobs import ROOT
from tests.trainer.train.trainings import Run, string_console
from trainer.cli.options import find_jobs
from trainer.cli.run_file import find_run_file, load_settings
from trainer.storage.rollout_file import Rollouts
from trainer.train import run_schema
from trainer.train.settings import TrainSettings
from trainer.train.start import train

ROWS = (
    {"question": "Ann has 3 eggs and buys 4. How many has she?", "answer": "She has 3+4=<<3+4=7>>7 eggs.\n#### 7"},
    {"question": "A box holds 12 pens. How many are in 3 boxes?", "answer": "There are 3*12=36 pens.\n#### 36"},
)


def load_run_file(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(find_run_file(name).read_text())
    return found


def test_help_lists_every_shipped_job(run: Run) -> None:
    output = " ".join(run("--help").replace("\n", " ").split())
    assert f"are examples: {', '.join(sorted(find_jobs()))}." in output


@pytest.mark.parametrize("file", sorted(find_jobs().values()), ids=lambda file: file.stem)
def test_shipped_jobs_have_valid_settings_and_match_the_schema(file: Path) -> None:
    TrainSettings.model_validate(load_run_file(file.stem))
    VALIDATOR.validate(load_run_file(file.stem))


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_feedback"])
async def test_gsm8k_job_trains_a_stand_in_of_the_same_architecture(
    name: str, tmp_path: Path, one_thread: None
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = load_run_file(name)
    values |= {"tools": str(ROOT / "tool_configs"), "model": str(save_tiny_model(tmp_path / "model", kind="qwen2"))}
    values |= {"data": str(tmp_path / "rows.jsonl"), "steps": 1, "prompts": 2, "n": 2}
    values["evaluation"] |= {"data": str(tmp_path / "rows.jsonl"), "rows": 2}
    values["limits"] |= {"turn_tokens": 16}
    settings = TrainSettings.model_validate(values)
    await train(settings, tmp_path / "run", string_console())
    rollouts = list(Rollouts(tmp_path / "run"))
    assert len(rollouts) == 4 and all("answer" in rollout.rewards for rollout in rollouts)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 1 and line["reward/answer"] == 0.0 and line["rollout/lost"] == 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("guess", ("environment.name=textarena:Guess-v0", f"environment.python={sys.executable}")),
        ("bandit", (f"environment.python={GYM_PYTHON}",)),
        ("lake", (f"environment.python={GYM_PYTHON}",)),
    ],
)
async def test_job_of_a_game_trains_on_gymnasium_or_a_stand_in_of_textarena(
    name: str, changes: tuple[str, ...], tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", add_to_path(STAND_IN))
    model = save_tiny_model(tmp_path / "model", kind="qwen2")
    small = (f"model={model}", "steps=1", "prompts=2", "n=2", "limits.turn_tokens=16")
    changes += (*small, "evaluation.every=0", "evaluation.after=false")
    settings = load_settings(TrainSettings, find_run_file(name), {}, overrides=changes)
    try:
        await train(settings, tmp_path / "run", string_console())
    finally:
        stop_hosts()
    rollouts = list(Rollouts(tmp_path / "run"))
    assert len(rollouts) == 4 and not any(rollout.stop.is_infrastructure for rollout in rollouts)
    assert {rollout.infos["environment"]["seed"] for rollout in rollouts} < {*range(1400)}


SCHEMA = json.loads(run_schema.schema_text())
VALIDATOR = jsonschema_rs.validator_for(SCHEMA)


def test_shipped_schema_matches_the_settings() -> None:
    assert run_schema.RUN_SCHEMA.read_text() == run_schema.schema_text(), (
        "run `python -m trainer.train.run_schema --write`"
    )


@pytest.mark.parametrize(
    "content", [{"stepz": 1}, {"update": {"learning_rate": 1}}, {"mode": "sync"}, {"prompts": 0}, {"objects": ["x"]}]
)
def test_schema_refuses_what_a_run_would(content: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(content)
