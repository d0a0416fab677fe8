"""Tests reading verl's YAML files, scripts and commands, errors with their lines, and the command `translate`."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.errors import ConfigError
from mtrl_plugins.scripts.translate import Translation, translate
from mtrl_plugins.verl.conversions import VERL_TABLE
from mtrl_plugins.verl.hydra_words import read_value
from mtrl_plugins.verl.read_config import read_command, read_keys
from tests.conftest import Write
from tests.trainer.cli_data import RunCommand
from trainer.cli.run_file import load_settings
from trainer.train.settings import TrainSettings


def translate_words(*words: str) -> Translation:
    return translate(read_command(words), VERL_TABLE)


CONFIG = """
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True

actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_user_turns: 5
"""
SCRIPT = r"""
# run on 8xH100
set -x
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/config"
BATCH=${BATCH:-512}
function now() {
    date '+%d-%H-%M'
}
EXPERIMENT_NAME="baseline_$(now)"

python3 -m verl.trainer.main_ppo \
    --config-path="$CONFIG_PATH" \
    --config-name='grpo_w_interaction' \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=$BATCH \
    data.max_response_length=$((1024 * 3)) \
    data.return_raw_chat=True \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    +actor_rollout_ref.model.enable_activation_offload=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=$BATCH \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.interaction_config_path="$PROJECT_DIR/interaction.yaml" \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name=$EXPERIMENT_NAME \
    data.train_files=$HOME/train.parquet \
    trainer.total_training_steps=20 $@ 2>&1 | tee run.log
"""


def test_config_with_defaults_references_and_overrides(write: Write) -> None:
    write("base.yaml", CONFIG)
    write(
        "mine.yaml",
        """
        defaults: [base, _self_]
        data:
          train_files: ${oc.env:ROWS,rows.parquet}
          val_files: ${data.train_files}
          max_response_length: 2048
        actor_rollout_ref:
          model: {path: some/model}
          rollout: {n: 8, multi_turn: {tool_config_path: t.yaml}}
        critic: {model: {path: "${actor_rollout_ref.model.path}"}}
        algorithm: {adv_estimator: grpo}
        trainer: {total_training_steps: 5}
        """,
    )
    settings: Any = translate(read_keys(Path("mine.yaml"), ["data.train_batch_size=512"]), VERL_TABLE).settings
    assert settings["prompts"] == 512
    assert settings["limits"]["rollout_tokens"] == 1024 + 2048
    assert settings["data"] == settings["evaluation"]["data"] == "rows.parquet"


def test_complete_config_with_old_spellings_and_relative_references(write: Write) -> None:
    write(
        "mine.yaml",
        """
        actor_rollout_ref:
          actor:
            optim: {lr: 1.0e-6, lr_scheduler_type: cosine, warmup_style: null, zero_indexed_step: true}
            checkpoint: {save_contents: [model], load_contents: "${.save_contents}"}
            ppo_micro_batch_size_per_gpu: ${oc.select:.ppo_micro_batch_size,null}
            ppo_mini_batch_size: ${...data.train_batch_size}
            qat: {enable: false, mode: w4a16}
          model: {path: some/model, mtp: {enable: false, method: mtp}}
          rollout: {n: 8}
        reward_model: {enable: null, reward_manager: null}
        reward:
          reward_model: {enable: false, model_path: "${oc.select:nobody.said}"}
          reward_manager: {source: register, name: naive, module: {path: null, name: mine}}
          custom_reward_function: {path: r.py, name: compute_score}
        data: {train_files: a.parquet, train_batch_size: 64}
        algorithm: {adv_estimator: grpo}
        trainer: {total_training_steps: 5}
        """,
    )
    settings: Any = translate_words("mine.yaml").settings
    assert settings["update"]["lr_scheduler"] == "cosine" and settings["update"]["minibatches"] == 1
    assert settings["reward"]["components"]["custom"]["args"] == {"path": "r.py", "name": "compute_score"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:\n  prompt_key: left\n", "mine.yaml:2: data.prompt_key: 'left' is not supported"),
        ("data:\n  seed: ${data.sede}\n", "mine.yaml:2: data.seed: ${data.sede} refers to an unknown key or variable"),
        ("data:\n  seed: ${data.seed}\n", "mine.yaml:2: data.seed: ${data.seed} refers to itself"),
        ("defaults: [nowhere]\ndata: {seed: 1}\n", "mine.yaml:1: defaults: 'nowhere' is not in the file's folder"),
        ("- data\n", "mine.yaml: is not a mapping"),
    ],
)
def test_error_in_yaml_is_reported_with_its_line(text: str, expected: str, write: Write) -> None:
    write("mine.yaml", text)
    with pytest.raises(ConfigError) as caught:
        translate_words("mine.yaml")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("train_batch_size=$BATCH", "train_batch_size=$(nproc)"),
            "run.sh:16: data.train_batch_size: only a shell can evaluate",
        ),
        (("grpo_w_interaction", "elsewhere"), "run.sh:14: --config-name: there is no file"),
        (("main_ppo", "main_generation"), "run.sh: has neither `python3 -m verl.trainer.main_ppo`"),
        (("data.return_raw_chat", "data.prompt_key=left data.x"), "run.sh:18: data.x: unknown key"),
    ],
)
def test_error_in_script_is_reported_with_its_line(change: tuple[str, str], expected: str, write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT.replace(*change))
    with pytest.raises(ConfigError) as caught:
        translate_words("run.sh")
    assert expected in str(caught.value)


def test_epochs_are_computed_from_local_rows(write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("rows.jsonl", '{"prompt": "?", "data_source": "openai/gsm8k"}\n' * 21)
    words = ["data.train_files=rows.jsonl", "~trainer.total_training_steps", "trainer.total_epochs=3"]
    words += ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.val_files=rows.jsonl"]
    settings: Any = translate_words(str(write("run.sh", SCRIPT)), *words).settings
    assert settings["steps"] == 3 * (21 // 4)
    assert settings["evaluation"]["rows"] == 21


def test_unknown_data_source_is_refused_when_translating(write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("rows.jsonl", '{"prompt": "?", "data_source": "openai/gsm8k"}\n{"prompt": "?", "data_source": "mine"}\n')
    with pytest.raises(ConfigError, match=r"the rows have the data source 'mine'.*\n.*custom_reward_function"):
        translate_words(str(write("run.sh", SCRIPT)), "data.train_files=rows.jsonl")


def test_translate_writes_run_file_and_reports_each_key(run: RunCommand, write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT)
    expected = run("translate", "run.sh", "data.seed=5", "--out", "runs/mine.yaml").output
    assert "data.seed -> seed: 5 (the command line)" in expected
    assert "data.max_response_length -> limits.turn_tokens: 3072 (run.sh:17)" in expected
    assert "written to runs/mine.yaml" in expected
    assert yaml.safe_load(Path("runs/mine.yaml").read_text())["seed"] == 5
    read = load_settings(TrainSettings, Path("runs/mine.yaml"), {})
    assert read == TrainSettings.model_validate(translate_words("run.sh", "data.seed=5").settings), (
        "`--config` reads it as it is"
    )
    second = run("translate", "run.sh", "--out", "runs/mine.yaml", code=2).output
    assert "runs/mine.yaml: --out: already exists" in second


def test_translate_fails_with_places_and_exit_code(run: RunCommand, write: Write) -> None:
    write("bad.yaml", "data:\n  prompt_key: left\n  shufle: true\n")
    expected = run("translate", "bad.yaml", code=2).output
    assert "bad.yaml:2: data.prompt_key" in expected and "bad.yaml:3: data.shufle: unknown key" in expected
    assert "there is no input" in run("translate", code=2).output
    assert "| `data.train_batch_size` | `prompts` |" in run("translate", "--table").output


def test_verl_keys_are_accepted_beside_options(run: RunCommand, write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT)
    expected = run("--out", "runs/a=b", "--verl-config", "run.sh", "data.prompt_key=left", "--dry-run", code=2).output
    assert "the command line: data.prompt_key: 'left' is not supported" in expected
    assert "cannot be combined with --config, --resume" in run("--verl-config", "run.sh", "--resume", code=2).output
    assert "`data` is no section there" in run("data.seed=1", code=2).output, "without the option it is of our settings"


LAUNCH = ("python3", "-m", "verl.trainer.main_ppo")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1e-4", 0.0001), ("-3e5", -300000.0), (".5", 0.5), ("1.", 1.0), ("1_000", 1000), ("inf", inf),
        ("True", True), ("false", False), ("null", None), ("None", "None"), ("on", "on"), ("yes", "yes"), ("No", "No"),
        ("007", "007"), ("0x1f", "0x1f"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("", ""), ("''", ""),
        ("'1'", "1"), ("'x y'", "x y"), ('"x, y"', "x, y"), ("x y", "x y"), (" 1", 1), ("'it\\'s'", "it's"),
        ("a\\,b", "a,b"), ("a:b", "a:b"), ("x@y", "x@y"), ("$x", "$x"), ("*", "*"), ("%", "%"),
        ("http://h:1/x?y", "http://h:1/x?y"), ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"), ("${x.y}", "${x.y}"),
        ("[]", []), ("{}", {}), ("[1,2]", [1, 2]), ("[a,'b']", ["a", "b"]), ("[[1,2],[3]]", [[1, 2], [3]]),
        ("[${x.y},'q']", ["${x.y}", "q"]), ("{c:1,d:e}", {"c": 1, "d": "e"}), ("{c: [1, x]}", {"c": [1, "x"]}),
        ("[a/b.parquet,/c/d-e_f.parquet]", ["a/b.parquet", "/c/d-e_f.parquet"]), ("'[1,2]'", "[1,2]"),
    ],
)  # fmt: skip
def test_values_are_those_that_hydra_1_3_8_reads(text: str, value: Any) -> None:
    read = read_value(text, "here")
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    ["1,2", "/a,/b", "int(3)", "range(1,3)", "a=b", "x#y", "&x", "!x", "(1)", "{'c d':1}", "\\'x\\'", "[1", "'x", "[1}",
     "{a}", "[1] 2", "[" * 50],
)  # fmt: skip
def test_values_that_hydra_refuses_or_makes_several_trainings_of_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Hydra cannot read"):
        read_value(text, "here")


@pytest.mark.parametrize("path", ["--config-path", "--config-dir", "-cp", "-cd"])
@pytest.mark.parametrize("name", ["--config-name", "-cn"])
@pytest.mark.parametrize("glue", [" ", "="])
def test_options_of_hydra_name_a_file_in_each_form(write: Write, path: str, name: str, glue: str) -> None:
    write("folder/mine.yaml", "algorithm: {adv_estimator: reinforce_plus_plus}\ndata: {train_batch_size: 7}\n")
    words = f"{path}{glue}folder {name}{glue}mine data.train_batch_size=8 --run".split()
    keys = read_command([*LAUNCH, *words])
    assert {key: placed.value for key, placed in keys.items()} == {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "data.train_batch_size": 8,
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trainer.nnodes = 1", "'trainer.nnodes' is not `key=value`\n  remedy: write `key=value`, without blanks"),
        ("trainer.nnodes= 1", "'1' is not `key=value`"),
        ("mine.yaml", "'mine.yaml' is not `key=value`"),
        ("-cm folder", "'-cm' is no option of a training; those of Hydra are --config-path, -cp"),
        ("--cfg job", "'--cfg' is no option of a training"),
        ("--multirun a.b=1", "--multirun: starts several trainings"),
        ("--config-name", "--config-name: has no value"),
        ("-cn nowhere", "there is no file nowhere.yaml"),
        ("data.seed=1,2", "commas separate the values of several trainings"),
    ],
)
def test_no_word_after_the_program_is_dropped(write: Write, words: str, says: str) -> None:
    write("run.sh", f"{' '.join(LAUNCH)} {words}\n")
    for command in ([*LAUNCH, *words.split()], ["run.sh"]):
        with pytest.raises(ConfigError) as caught:
            read_command(command)
        assert says in str(caught.value)


def test_a_second_file_is_not_dropped(write: Write) -> None:
    write("run.yaml", "data: {seed: 1}\n")
    with pytest.raises(ConfigError, match=r"'other.yaml' is not `key=value`, and 'run.yaml' is the file"):
        read_command(["run.yaml", "other.yaml", "data.seed=2"])
    assert Path("run.yaml").exists() and read_command(["data.seed=2", "run.yaml"])["data.seed"].value == 2
