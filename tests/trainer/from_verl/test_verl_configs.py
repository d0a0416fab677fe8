"""A YAML file, a script and a typed command of verl's say the same here; mistakes in them are told by file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.trainer.typed import Run
from trainer.cli.settings import validated
from trainer.train.settings import TrainSettings
from trainer.verl.translate import Translation, translate
from trainer.verl.written import of_words, written


def of(*words: str) -> Translation:
    return translate(of_words(words))


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


def test_a_script_is_read_with_its_variables_sums_and_configuration(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT)
    settings: Any = of("run.sh").settings
    assert (settings["prompts"], settings["n"], settings["steps"]) == (512, 8, 20)
    assert settings["limits"]["rollout_tokens"] == 1024 + 3072
    assert settings["limits"]["user_turns"] == 5
    assert settings["tools"] == [str(tmp_path / "interaction.yaml")]
    assert settings["data"] == "/home/me/train.parquet"
    assert settings["report"] == ["wandb"]
    monkeypatch.setenv("BATCH", "64")
    assert of("run.sh", "data.seed=3").settings["prompts"] == 64


def test_the_doubled_line_ends_of_the_documentation_are_read_too(write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT.replace("\\\n", "\\\\\n"))
    assert of("run.sh").settings["n"] == 8


def test_words_in_arrays_have_the_places_where_they_stand(write: Write) -> None:
    write(
        "run.sh",
        r"""
        DATA=(
            data.train_files="['a.parquet','b.parquet']"
            data.train_batch_size=${BATCH:-"${OTHER:-64}"}  # prompts
        )
        MODEL=(actor_rollout_ref.model.path=some/model actor_rollout_ref.actor.ppo_mini_batch_size=64)
        python3 -m verl.trainer.main_ppo \
            "${DATA[@]}" \
            "${MODEL[@]}" \
            algorithm.adv_estimator=grpo trainer.total_training_steps=3 "$@"
        """,
    )
    found = of("run.sh")
    assert (found.settings["data"], found.settings["prompts"]) == ("a.parquet, b.parquet", 64)
    assert {one.key: one.place for one in found.became}["data.train_batch_size"] == "run.sh:4"


def test_a_configuration_of_one_file_and_what_lies_beside_it(write: Write) -> None:
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
          rollout: {multi_turn: {tool_config_path: t.yaml}}
        critic: {model: {path: "${actor_rollout_ref.model.path}"}}
        algorithm: {adv_estimator: grpo}
        trainer: {total_training_steps: 5}
        """,
    )
    settings: Any = translate(written(Path("mine.yaml"), ["data.train_batch_size=512"])).settings
    assert settings["prompts"] == 512
    assert settings["limits"]["rollout_tokens"] == 1024 + 2048
    assert settings["data"] == settings["evaluation"]["data"] == "rows.parquet"


def test_a_whole_configuration_has_old_spellings_that_say_nothing_and_keys_that_stand_for_their_neighbours(
    write: Write,
) -> None:
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
    settings: Any = of("mine.yaml").settings
    assert settings["update"]["fall"] == "cosine" and settings["update"]["minibatches"] == 1
    assert settings["reward"]["components"]["custom"]["args"] == {"path": "r.py", "name": "compute_score"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data:\n  truncation: left\n", "mine.yaml:2: data.truncation: a prompt that is cut"),
        ("data:\n  train_batch_size: 8\n  train_batch_size: 9\n", "mine.yaml: line 3, column 3: the key"),
        ("data: [\n", "mine.yaml: line 2, column 1: is no YAML"),
        ("data:\n  seed: ${data.sede}\n", "mine.yaml:2: data.seed: ${data.sede} stands for nothing that is known"),
        ("data:\n  seed: ${data.seed}\n", "mine.yaml:2: data.seed: ${data.seed} stands for itself in the end"),
        ("defaults: [nowhere]\ndata: {seed: 1}\n", "mine.yaml:1: defaults: 'nowhere' does not lie beside the file"),
        ("- data\n", "mine.yaml: is no mapping"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(text: str, told: str, write: Write) -> None:
    write("mine.yaml", text)
    with pytest.raises(ConfigError) as caught:
        of("mine.yaml")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("train_batch_size=$BATCH", "train_batch_size=$(nproc)"), "run.sh:16: data.train_batch_size: only a shell"),
        (("=$BATCH", "=$NOWHERE"), "run.sh:16: data.train_batch_size: only a shell would know"),
        (("grpo_w_interaction", "elsewhere"), "run.sh:14: --config-name: there is no file"),
        (("data.return_raw_chat=True", "data.return_raw_chat='True"), "run.sh:18: cannot be read as a shell would"),
        (("main_ppo", "main_generation"), "run.sh: holds no `python3 -m verl.trainer.main_ppo`"),
        (("data.return_raw_chat", "data.truncation=left data.x"), "run.sh:18: data.x: is no key that is known here"),
    ],
)
def test_a_mistake_in_a_script_is_told_with_its_line(change: tuple[str, str], told: str, write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT.replace(*change))
    with pytest.raises(ConfigError) as caught:
        of("run.sh")
    assert told in str(caught.value)


def test_nothing_of_a_script_is_run(write: Write, tmp_path: Path) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    hostile = SCRIPT.replace("set -x", "touch ran-1\nX=$(touch ran-2)").replace("$((1024 * 3))", "$((9**9**9**9))")
    write("run.sh", hostile)
    with pytest.raises(ConfigError, match="only a shell would know"):
        of("run.sh")
    assert not list(tmp_path.glob("ran-*"))


def test_epochs_are_counted_where_the_rows_are_at_hand(write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("rows.jsonl", '{"prompt": "?", "data_source": "openai/gsm8k"}\n' * 21)
    words = ["data.train_files=rows.jsonl", "~trainer.total_training_steps", "trainer.total_epochs=3"]
    words += ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.val_files=rows.jsonl"]
    settings: Any = of(str(write("run.sh", SCRIPT)), *words).settings
    assert settings["steps"] == 3 * (21 // 4)
    assert settings["evaluation"]["rows"] == 21


def test_rows_whose_rule_is_not_known_are_refused_before_anything_starts(write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("rows.jsonl", '{"prompt": "?", "data_source": "openai/gsm8k"}\n{"prompt": "?", "data_source": "mine"}\n')
    with pytest.raises(ConfigError, match=r"the rows are of 'mine'.*\n.*custom_reward_function"):
        of(str(write("run.sh", SCRIPT)), "data.train_files=rows.jsonl")


def test_translate_writes_a_run_file_and_tells_what_became_of_each_key(run: Run, write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT)
    told = run("translate", "run.sh", "data.seed=5", "--out", "runs/mine.yaml").output
    assert "data.seed -> seed: 5 (the command line)" in told
    assert "data.max_response_length -> limits.turn_tokens: 3072 (run.sh:17)" in told
    assert "written: runs/mine.yaml" in told
    assert yaml.safe_load(Path("runs/mine.yaml").read_text())["seed"] == 5
    read = validated(TrainSettings, Path("runs/mine.yaml"), {})
    assert read == TrainSettings.model_validate(of("run.sh", "data.seed=5").settings), "`--config` reads it as it is"
    again = run("translate", "run.sh", "--out", "runs/mine.yaml", code=2).output
    assert "runs/mine.yaml: --out: is there already" in again


def test_translate_takes_a_whole_command(run: Run, write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    words = ("python3", "-m", "verl.trainer.main_ppo", "--config-path=config", "--config-name=grpo_w_interaction")
    keys = ("actor_rollout_ref.model.path=m", "data.train_files=org/d", "algorithm.adv_estimator=grpo")
    told = run("translate", *words, *keys, "trainer.total_training_steps=3").output
    assert "steps: 3  # trainer.total_training_steps" in told
    assert "prompts: 256  # data.train_batch_size" in told


def test_translate_refuses_with_places_and_a_code(run: Run, write: Write) -> None:
    write("bad.yaml", "data:\n  truncation: left\n")
    told = run("translate", "bad.yaml", code=2).output
    assert "bad.yaml:2: data.truncation" in told
    assert "nothing is named" in run("translate", code=2).output
    assert "| `data.train_batch_size` | `prompts` |" in run("translate", "--table").output


def test_keys_of_verls_stand_beside_our_own_options(run: Run, write: Write) -> None:
    write("config/grpo_w_interaction.yaml", CONFIG)
    write("run.sh", SCRIPT)
    told = run("--out", "runs/a=b", "--verl-config", "run.sh", "data.truncation=left", "--dry-run", code=2).output
    assert "the command line: data.truncation: a prompt that is cut" in told
    assert "goes without --config and --resume" in run("--verl-config", "run.sh", "--resume", code=2).output
    assert "No such command" in run("data.seed=1", code=2).output
