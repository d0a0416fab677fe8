"""Keys of verl's examples that change no result are translated or told, and those that do are refused."""

from __future__ import annotations

import pytest

from mtrl_plugins.scripts.script_reader import ScriptReader
from mtrl_plugins.scripts.translate import translate
from mtrl_plugins.verl.conversions import VERL_TABLE
from mtrl_plugins.verl.read_config import read_command
from tests.conftest import Write
from tests.plugins.verl.test_verl_keys import ROLLOUT, get_error, get_setting, translate_words


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("data.truncation=left data.filter_overlong_prompts=True", "prompts", 1024),
        (f"{ROLLOUT}.val_kwargs.do_sample=True {ROLLOUT}.val_kwargs.n=4 {ROLLOUT}.val_kwargs.top_p=0.7", "n", 1),
        ("trainer.logger=[console,swanlab,wandb]", "report", ["wandb"]),
        ("trainer.test_freq=False", "evaluation.every", 0),
        ("+recipe=one_step_off_policy", "mode", "one_step_off"),
        ("actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.alpha=16", "update.lora",
         {"rank": 8, "alpha": 16}),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.", "prompts", 1024),
    ],
)  # fmt: skip
def test_key_is_translated(words: str, setting: str, value: object) -> None:
    assert get_setting(translate_words(*words.split()), setting) == value


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("data.truncation=left", "or `data.filter_overlong_prompts=True`"),
        ("recipe=vla", "the recipe 'vla' is not supported"),
        ("actor_rollout_ref.model.lora.target_modules=[linear_qkv]", "'linear_qkv' is a module of Megatron's models"),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.1", "write it into the configuration"),
    ],
)
def test_key_that_changes_the_result_is_refused(words: str, expected: str) -> None:
    assert expected in get_error(*words.split())


def test_recipe_of_the_program_is_its_mode(write: Write) -> None:
    keys = "actor_rollout_ref.model.path=m data.train_files=d algorithm.adv_estimator=grpo rollout.nnodes=1"
    command = f"python3 -m recipe.one_step_off_policy.main_ppo {keys} trainer.total_training_steps=3"
    file = write("run.sh", f"export VLLM_USE_V1=1\n{command} actor_rollout_ref.actor.ppo_mini_batch_size=1024\n")
    translation = translate(read_command([file.name], ScriptReader(tell=lambda line: None)), VERL_TABLE)
    assert translation.settings["mode"] == "one_step_off"
    assert {key.key: key.place for key in translation.keys}["recipe"] == "run.sh:2"


def test_key_of_the_command_line_overrides_the_script_in_any_spelling(write: Write) -> None:
    keys = (
        "actor_rollout_ref.model.path=m data.train_files=d algorithm.adv_estimator=grpo trainer.total_training_steps=3"
    )
    file = write("run.sh", f"python3 -m verl.trainer.main_ppo {keys} actor_rollout_ref.actor.grad_clip=0.5\n")
    words = ["actor_rollout_ref.actor.optim.clip_grad=0.25", "actor_rollout_ref.actor.ppo_mini_batch_size=1024"]
    translation = translate(read_command([file.name, *words], ScriptReader(tell=lambda line: None)), VERL_TABLE)
    assert translation.settings["update"]["max_grad_norm"] == 0.25
