"""`mtrl-train translate` of a script for TRL, or of a YAML file for `trl grpo --config`; a script is never run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.trainer.cli_data import RunCommand

TRL_SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
args = GRPOConfig(num_generations=4, per_device_train_batch_size=8, learning_rate=2e-6, max_completion_length=128)
GRPOTrainer(model="models/q", reward_funcs=len, args=args, train_dataset=rows, peft_config=LoraConfig(r=8))
"""
TRL_YAML = """
model_name_or_path: models/q
dataset_name: rows.jsonl
num_generations: 4
per_device_train_batch_size: 8
learning_rate: 2.0e-6
use_peft: true
lora_r: 8
"""


@pytest.mark.parametrize(("file", "text"), [("grpo.py", TRL_SCRIPT), ("grpo.yaml", TRL_YAML)])
def test_settings_are_taken_over(run: RunCommand, place: Path, file: str, text: str) -> None:
    Path(file).write_text(text)
    assert "Same meaning" in run("translate", file, "--out", "run.yaml").output
    settings = yaml.safe_load(written := Path("run.yaml").read_text())
    assert (settings["model"], settings["n"], float(settings["update"]["lr"])) == ("models/q", 4, 2e-6)
    assert settings.get("data") == (None if file == "grpo.py" else "rows.jsonl") and "# num_generations" in written
    assert settings["update"]["lora"]["rank"] == 8 and settings["steps"] == 100


def test_what_a_script_has_as_python_objects_is_named_instead_of_dropped(run: RunCommand, place: Path) -> None:
    objects = "GRPOTrainer('models/q', my_reward, args, rows, callbacks=[c], tools=[look])"
    Path("grpo.py").write_text(f"args = GRPOConfig('out', max_steps=3)\n{objects}\n")
    output = " ".join(run("translate", "grpo.py", "--out", "run.yaml").output.split())
    for name in ("reward_funcs", "train_dataset", "callbacks", "tools"):
        assert f"{name} (grpo.py:2)" in output, name
    settings = yaml.safe_load(Path("run.yaml").read_text())
    assert settings["model"] == "models/q" and settings["out"] == "out"
    Path("grpo.py").write_text("GRPOTrainer(model=load(), args=GRPOConfig(max_steps=3))")
    assert "model (grpo.py:1) - is computed there" in run("translate", "grpo.py").output


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("GRPOConfig(max_steps=3, **common)", "**: is computed: common"),
        ("GRPOConfig(learning_rate=rate * 2)", "learning_rate: is computed: rate * 2"),
        ("GRPOTrainer('q', peft_config=LoraConfig(r=RANK), args=GRPOConfig(max_steps=3))", "r: is computed: RANK"),
        ("GRPOTrainer('q', peft_config=make(), args=GRPOConfig(max_steps=3))", "peft_config: is computed: make()"),
        ("GRPOConfig('out', 3)", "argument 2: unknown key"),
        ("GRPOConfig(", "is not Python"),
        ("print(1)", "has no arguments of a GRPO run"),
    ],
)
def test_settings_that_only_python_could_compute_are_refused(
    run: RunCommand, place: Path, script: str, problem: str
) -> None:
    Path("grpo.py").write_text(script)
    output = " ".join(run("translate", "grpo.py", "--out", "run.yaml", code=2).output.split())
    assert problem in output and "grpo.py" in output and not Path("run.yaml").exists()
