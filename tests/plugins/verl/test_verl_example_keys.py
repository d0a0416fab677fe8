"""Keys of verl's examples that change no result are translated or told, and those that do are refused."""

from __future__ import annotations

from mtrl_plugins.scripts.script_reader import ScriptReader
from mtrl_plugins.scripts.translate import translate
from mtrl_plugins.verl.conversions import VERL_TABLE
from mtrl_plugins.verl.read_config import read_command
from tests.conftest import Write
from tests.plugins.verl.test_verl_keys import ROLLOUT, get_error, get_setting, translate_words
from tests.trainer.train.jobs import demo_model


def test_truncation_is_refused_for_a_row_that_is_too_long_and_for_no_other(write: Write) -> None:
    words = [f"actor_rollout_ref.model.path={demo_model()}", "data.train_files=rows.jsonl", "data.truncation=left"]
    reward = ["custom_reward_function.path=rewards.py"]
    write("rows.jsonl", '{"prompt": [{"role": "user", "content": "why?"}]}\n{"prompt": "' + "why " * 600 + '"}\n')
    expected = get_error(*words, *reward)
    assert (
        "the prompt of rows.jsonl:2 has 1800 tokens" in expected
        and "or `data.filter_overlong_prompts=True`" in expected
    )
    write("rows.jsonl", '{"prompt": [{"role": "user", "content": "why?"}]}\n')
    assert get_setting(translate_words(*words, *reward), "prompts") == 1024


def test_positions_of_a_model_that_has_fewer_are_refused(write: Write) -> None:
    write("model/config.json", '{"max_position_embeddings": 512}')
    words = "actor_rollout_ref.model.path=model +actor_rollout_ref.model.override_config.max_position_embeddings=4096"
    assert "{'max_position_embeddings': 4096} is not supported" in get_error(*words.split())


def test_recipe_of_the_program_is_its_mode(write: Write) -> None:
    keys = "actor_rollout_ref.model.path=m data.train_files=d algorithm.adv_estimator=grpo rollout.nnodes=1"
    keys += f" {ROLLOUT}.n=8"
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
    words.append(f"{ROLLOUT}.n=8")
    translation = translate(read_command([file.name, *words], ScriptReader(tell=lambda line: None)), VERL_TABLE)
    assert translation.settings["update"]["max_grad_norm"] == 0.25
