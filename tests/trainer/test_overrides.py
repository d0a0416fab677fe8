"""Settings on the command line (`update.lr=1e-4`), and the words of other frameworks for settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.errors import ConfigError
from trainer.cli import app
from trainer.cli.meant_settings import MEANT_SETTINGS
from trainer.cli.run_file import load_settings
from trainer.rollout.settings import RolloutSettings, flatten_settings
from trainer.train.settings import TrainSettings


def load(tmp_path: Path, *words: str, **values: Any) -> TrainSettings:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": "m", "data": "d.jsonl", **values}))
    return load_settings(TrainSettings, file, {}, overrides=words)


def test_words_set_nested_settings_lists_and_mappings(tmp_path: Path) -> None:
    words = "update.lr=1e-4", "steps=7", "report=[wandb]", "update.lora={rank: 4}", "reward.components.a.function=exact"
    settings = load(
        tmp_path, *words, update={"weight_decay": 0.1}, reward={"components": {"a": {"function": "answer"}}}
    )
    assert (settings.update.lr, settings.update.weight_decay, settings.steps) == (1e-4, 0.1, 7)
    assert settings.report == ("wandb",) and settings.update.lora is not None and settings.update.lora.rank == 4
    assert settings.reward.components["a"].function == "exact"
    assert load(tmp_path, "update.lora.rank=2").update.model_dump()["lora"]["rank"] == 2


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("updates.lr=1", "updates: unknown key\n  remedy: did you mean `update`?"),
        ("update.lr=much", "update.lr: expected a valid number"),
        ("model.path=x", "model.path=x: `model` is no section there"),
        ("steps=[", "steps=[: has no YAML value"),
        ("lora={rank: 8}", "lora: unknown key\n  remedy: you probably mean `update.lora`"),
        ("update.warmup=4", "update.warmup: unknown key\n  remedy: you probably mean `update.warmup_steps`"),
    ],
)
def test_a_word_that_sets_nothing_is_refused(word: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, word)
    assert told in str(raised.value)


@pytest.mark.parametrize("command", ["rollout", "sft"])
def test_every_command_with_settings_takes_words(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: m\ndata: d.jsonl\n" + ("out: o\n" if command == "rollout" else ""))
    done = CliRunner().invoke(app, [command, "--config", "run.yaml", "limits.turns=3"])
    assert done.exit_code == 2 and "limits.turns: unknown key" in done.output
    assert "you probably mean `limits.assistant_turns`" in done.output


def test_an_evaluation_refuses_words_that_it_would_not_feel(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["eval", str(tmp_path), "update.lr=1"])
    assert done.exit_code == 2 and "update.lr=1: an evaluation does not read `update`" in done.output
    done = CliRunner().invoke(app, ["eval", str(tmp_path), "limits.turn_tokens=1"])
    assert done.exit_code == 2 and "not a run of `mtrl-train`" in done.output
    (tmp_path / "run.json").write_text('{"settings": {"early_stop": {"window": 5}}}')
    done = CliRunner().invoke(app, ["eval", str(tmp_path)])
    assert done.exit_code == 2 and "settings.early_stop.window: a setting of the run does not fit" in done.output


def test_every_answer_names_a_setting() -> None:
    settings = TrainSettings.model_validate(
        {
            "model": "m", "data": "d", "update": {"lora": {}, "critic": {}},
            "algorithm": {"overlong": {"limit": 2, "buffer": 1}},
        }
    )  # fmt: skip
    known = {
        *flatten_settings(settings.model_dump()),
        *flatten_settings(RolloutSettings(model="m", data="d", out="o").model_dump()),
    }  # type: ignore[arg-type]
    parts = {part for name in known for part in name.split(".")} | {"heartbeat_timeout_s"}
    for meant in MEANT_SETTINGS.values():
        assert set(meant.partition(":")[0].split(".")) <= parts, meant
