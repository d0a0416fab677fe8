"""A run from Python is an ordinary run: its folder, its progress, resuming, evaluating and saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway.errors import ConfigError
from mtrl_plugins.trl.api import GRPO, TrainOutput
from tests.plugins.trl.scripted_grpo import Recorder, make_trainer, price, script_policy
from tests.trainer.cli_data import RunCommand
from tests.trainer.policy_scripts import render_calls
from trainer.train.run_folder import load_run_settings

ROWS = [{"prompt": [{"role": "user", "content": "What does a pear cost?"}], "total": 3}] * 2
SHORT = {"max_completion_length": 8}

pytestmark = pytest.mark.usefixtures("place")


def by_length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(completion[0]["content"]))) for completion in completions]


def train(model: Path, **kwargs: Any) -> tuple[GRPO, TrainOutput]:
    args = {**SHORT, **kwargs.pop("args", {})}
    trainer = make_trainer(model, ROWS, by_length, args=args, tools=[price], **kwargs)
    return trainer, trainer.train()


def test_a_run_trains_a_model_that_can_be_saved_and_says_where_everything_is(
    model: Path, run: RunCommand, tmp_path: Path
) -> None:
    trainer, output = train(model, args={"max_steps": 2, "learning_rate": 1e-3})
    assert output.global_step == 2 and output.folder == Path("run")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert output.training_loss == pytest.approx(sum(line["loss"] for line in lines) / 2)
    assert output.metrics["train_loss"] == output.training_loss and output.metrics["train_runtime"] > 0
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2] and trainer.state.global_step == 2
    AutoModelForCausalLM.from_pretrained(output.policy)
    settings = load_run_settings(output.folder)
    assert settings.objects == ("train_dataset", "reward_funcs.by_length", "tools.price")
    assert "by_length" in run("show", "run", "0").output
    for command in (("eval", "run"), ("--resume", "--out", "run")):
        assert "in the script that made it" in run(*command, code=2).output
    folder = trainer.save_model(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert not {"optimizer.pt", "state.json"} & {file.name for file in folder.iterdir()}
    assert (output.policy / "optimizer.pt").exists()


def test_a_run_is_resumed_by_the_script_that_made_it(model: Path) -> None:
    train(model, args={"max_steps": 1, "save_steps": 1, "lr_scheduler_type": "constant"})
    args = {**SHORT, "max_steps": 2, "save_steps": 1, "lr_scheduler_type": "constant"}
    trainer = make_trainer(model, ROWS, by_length, args=args, tools=[price])
    with pytest.raises(ConfigError, match=r"already has a run\n.*resume_from_checkpoint=True"):
        trainer.train()
    output = trainer.train(resume_from_checkpoint=True)
    assert output.global_step == 2 and output.metrics["step"] == 2


def test_the_policy_is_evaluated_on_the_rows_for_evaluation(model: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "What does an apple cost?"}]}] * 3
    trainer, output = train(model, eval_dataset=rows, args={"eval_strategy": "steps", "eval_steps": 1})
    assert output.metrics["eval/tasks"] == 3
    values = trainer.evaluate()
    assert values["tasks"] == 3 and values["held_out"] and 0 <= values["greedy"] <= 1


def test_a_loaded_model_is_saved_into_the_run_first(model: Path) -> None:
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    args = {**SHORT, "output_dir": "run", "max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4}
    given: dict[str, Any] = {"reward_funcs": by_length, "args": args, "train_dataset": ROWS}
    with pytest.raises(ConfigError, match="processing_class"):
        GRPO(loaded, **given).train()
    assert GRPO(loaded, processing_class=tokenizer, **given).train().global_step == 1
    assert Path("run/initial_model/config.json").exists()


async def test_settings_of_a_run_file_override_the_arguments_also_where_an_event_loop_runs(model: Path) -> None:
    _, output = train(model, settings={"steps": 2, "update": {"minibatches": 2}, "checkpoint": {"every": 1}})
    settings = load_run_settings(output.folder)
    assert output.metrics["step"] == 2
    assert settings.update.minibatches == 2 and settings.update.lr == 1e-6


def test_tools_of_a_folder_stand_beside_functions(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    (tmp_path / "sums.yaml").write_text("tools: [{function: 'sums:add'}]\n")
    script_policy(monkeypatch, [[render_calls(("add", {"a": 2, "b": 3}), ("price", {"item": "pear"})), "done"]])
    recorder = Recorder()
    make_trainer(model, ROWS, recorder, tools=[price, "sums.yaml"]).train()
    answers = [message["content"] for message in recorder.calls[0]["completions"][0] if message["role"] == "tool"]
    assert answers == ["5", "3"]


def test_the_next_free_folder_is_taken_where_none_is_named(model: Path) -> None:
    trainer = GRPO(str(model), by_length, {**SHORT, "max_steps": 1}, ROWS)
    with pytest.raises(ConfigError, match="no run yet"):
        _ = trainer.folder
    assert trainer.train().folder == Path("runs") / model.name
