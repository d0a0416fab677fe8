"""Tests the translation of each verl key, in all spellings, and the errors for unsupported values."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.scripts.script_reader import ScriptReader
from mtrl_plugins.scripts.translate import Translation, format_report, translate
from mtrl_plugins.verl.conversions import VERL_TABLE
from mtrl_plugins.verl.read_config import read_command, read_keys
from tests.conftest import Write
from tests.trainer.train.jobs import demo_model
from trainer.train.settings import TrainSettings

MINIMAL = (
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
    "data.train_files=org/data",
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=10",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.rollout.n=8",
)
ROLLOUT = "actor_rollout_ref.rollout"
OLDER = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
NEWER = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


def translate_words(*words: str) -> Translation:
    return translate(read_keys(None, [*MINIMAL, *words]), VERL_TABLE)


def get_setting(translation: Translation, setting: str) -> Any:
    value: Any = translation.settings
    for name in setting.split("."):
        value = value.get(name) if value is not None else None
    return value


def get_error(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        translate_words(*words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "setting", "value"),
    [
        ("data.val_files=['v.parquet']", "evaluation.data", "v.parquet"),
        ("data.val_max_samples=64", "evaluation.rows", 64),
        (f"{OLDER}=4", "distributed", {"context_parallel": 4}),
        (f"{OLDER}=4 {NEWER}=1", "distributed", {"context_parallel": 4}),
        (f"{OLDER}=1 {NEWER}=2", "distributed", {"context_parallel": 2}),
        (f"{NEWER}=1", "distributed", None),
        ("data.train_files=['a','b']", "data", "a, b"),
        ("data.truncation=left data.filter_overlong_prompts=True", "prompts", 1024),
        ("data.truncation=left", "prompts", 1024),
        ("data.prompt_key=question", "prompts", 1024),
        ("+actor_rollout_ref.model.override_config.max_position_embeddings=32768", "prompts", 1024),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.", "prompts", 1024),
        (f"{ROLLOUT}.val_kwargs.do_sample=True {ROLLOUT}.val_kwargs.n=4 {ROLLOUT}.val_kwargs.top_p=0.7", "n", 8),
        ("data.image_key=pictures", "columns", {"image_key": "pictures", "video_key": "videos"}),
        ("+data.apply_chat_template_kwargs.enable_thinking=False", "template.chat_template_kwargs",
         {"enable_thinking": False}),
        (f"{ROLLOUT}.temperature=0.7", "sampling.temperature", 0.7),
        (f"{ROLLOUT}.top_k=-1", "sampling.top_k", 0),
        (f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml", "tools", ["tools.yaml"]),
        (f"{ROLLOUT}.interaction_config_file=user.yaml", "tools", ["user.yaml"]),
        (f"{ROLLOUT}.multi_turn=True", "limits.assistant_turns", 512),
        (f"{ROLLOUT}.multi_turn.enable=False", "limits.assistant_turns", 1),
        ("rollout.multiturn.max_turns=5 rollout.multiturn.enabled=true", "limits.assistant_turns", 5),
        (f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=ignore_strippable", "template.sanity",
         "ignore_strippable"),
        (f"{ROLLOUT}.multi_turn.use_inference_chat_template=True", "template.history", "inference_template"),
        (f"{ROLLOUT}.multi_turn.format=llama3_json {ROLLOUT}.multi_turn.tool_config_path=t.yaml", "template.parser",
         "llama3_json"),
        (f"{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3", "serving.options", ["--attention-backend", "fa3"]),
        ("data.max_response_length=3072 data.max_prompt_length=1024", "limits.rollout_tokens", 4096),
        (f"{ROLLOUT}.max_model_len=800", "limits.rollout_tokens", 800),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000", "update.micro_batch_tokens", 24000),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "update.micro_batch_tokens", 4096),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.2", "update.warmup_steps", 8),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=3 actor_rollout_ref.actor.ppo_epochs=2",
         "update.warmup_steps", 24),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "update.lr_scheduler", "cosine"),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", "update.min_lr_ratio", 0.0),
        ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=32", "update.lora",
         {"rank": 8, "alpha": 32}),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "algorithm.clip_low", 0.3),
        ("actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_high=0.4", "algorithm.clip_high",
         0.4),
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl",
         {"coefficient": 0.001, "estimator": "k3", "in_reward": False}),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl+", "algorithm.kl",
         {"coefficient": 0.001, "estimator": "k3+", "in_reward": False, "importance": "none"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl",
         {"coefficient": 0.01, "estimator": "k1", "in_reward": True}),
        ("algorithm.adv_estimator=rloo data.train_batch_size=256", "algorithm.name", "rloo"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.name", "reinforce_pp"),
        ("algorithm.adv_estimator=gae algorithm.lam=0.95", "algorithm.credit",
         {"kind": "gae", "gamma": 1.0, "lam": 0.95}),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.name", "dr_grpo"),
        ("actor_rollout_ref.actor.freeze_vision_tower=True", "update.freeze_vision", True),
        ("actor_rollout_ref.actor.freeze_vision_tower=False", "update.freeze_vision", None),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.multi_turn.tool_config_path=t.yaml", "tools",
         ["t.yaml"]),
        (f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent {ROLLOUT}.multi_turn.enable=True",
         "limits.assistant_turns", 1),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.mismatch", {"truncate": "token", "cap": 2.0}),
        ("algorithm.rollout_correction.rollout_rs=geometric algorithm.rollout_correction.rollout_rs_threshold=4.0",
         "algorithm.mismatch", {"reject": "geometric", "bounds": [0.25, 4.0]}),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=5", "algorithm.mismatch", {"truncate": "token", "cap": 5}),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=5",
         "algorithm.dynamic_sampling", 5),
        ("reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=128", "algorithm.overlong",
         {"limit": 512, "buffer": 128, "penalty": 1.0}),
        ("custom_reward_function.path=r.py custom_reward_function.name=mine", "reward.components",
         {"custom": {"function": "mtrl_plugins.verl.reward_function:custom",
                     "args": {"path": "r.py", "name": "mine"}}}),
        ("reward.custom_reward_function.path=r.py +reward.custom_reward_function.reward_kwargs.strict=True "
         "reward.num_workers=4 reward.reward_manager.name=naive", "reward.components",
         {"custom": {"function": "mtrl_plugins.verl.reward_function:custom",
                     "args": {"path": "r.py", "name": "compute_score", "kwargs": {"strict": True}}}}),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64",
         "algorithm.overlong", {"limit": 512, "buffer": 64, "penalty": 1.0}),
        ("trainer.save_freq=20", "checkpoint.every", 20),
        ("trainer.max_actor_ckpt_to_keep=1", "checkpoint.keep", 2),
        ("trainer.test_freq=5", "evaluation.every", 5),
        ("trainer.test_freq=False", "evaluation.every", 0),
        ("trainer.logger=[console,swanlab,wandb]", "report", ["wandb"]),
        ("+recipe=one_step_off_policy", "mode", "one_step_off"),
        ("actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.alpha=16", "update.lora",
         {"rank": 8, "alpha": 16}),
        ('trainer.logger=["console","wandb"]', "report", ["wandb"]),
    ],
)  # fmt: skip
def test_key_becomes_setting(word: str, setting: str, value: Any) -> None:
    translation = translate_words(*word.split(" "))
    assert get_setting(translation, setting) == value
    TrainSettings.model_validate(translation.settings)


def test_missing_keys_have_verls_defaults() -> None:
    translation = translate_words()
    for setting, value in {
        "prompts": 1024, "n": 8, "update.lr": 1e-6, "update.weight_decay": 0.01, "update.betas": [0.9, 0.999],
        "update.gradient_checkpointing": True, "update.minibatches": 4, "algorithm.aggregate": "token",
        "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "algorithm.clip_dual": 3.0, "algorithm.kl": None,
        "algorithm.mismatch": {"truncate": "never"},
        "limits.assistant_turns": 1, "limits.user_turns": 0, "tools": [], "evaluation.every": 0,
    }.items():  # fmt: skip
        assert get_setting(translation, setting) == value, setting
    assert get_setting(translate_words(f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml"), "result_limit") == {
        "chars": 256,
        "side": "middle",
    }


def test_turn_limits_account_for_verls_counting() -> None:
    tools, turns = f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml", f"{ROLLOUT}.multi_turn"
    translation = translate_words(tools, f"{turns}.max_user_turns=5", f"{turns}.max_assistant_turns=20")
    assert (get_setting(translation, "limits.assistant_turns"), get_setting(translation, "limits.user_turns")) == (6, 5)
    translation = translate_words(tools, f"{turns}.max_assistant_turns=20", f"{turns}.max_parallel_calls=4")
    limits = translation.settings["limits"]
    assert (limits["assistant_turns"], limits["user_turns"], limits["tool_calls"]) == (20, 20, 80)
    assert limits["parallel_calls"] == 4 and get_setting(translate_words(tools), "limits.parallel_calls") == 1
    unlimited = translate_words(tools)
    assert get_setting(unlimited, "limits.assistant_turns") == get_setting(unlimited, "limits.turn_tokens") == 512


def test_gspo_ignores_loss_agg_mode_as_in_verl() -> None:
    mean = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
    translation = translate_words("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", mean)
    assert (get_setting(translation, "algorithm.aggregate"), get_setting(translation, "algorithm.length")) == (
        "sequence",
        None,
    )
    expected = next(line for line in format_report(translation).splitlines() if "loss_agg_mode" in line)
    assert "-> algorithm.aggregate: sequence" in expected and "gspo, and its KL, always use `sequence`" in expected


def test_critic_keys_matter_only_with_gae() -> None:
    words = ("critic.model.path=another", "critic.optim.lr_warmup_steps_ratio=0.1", "critic.model.lora_rank=8")
    assert get_setting(translate_words(*words), "update.critic") is None
    words = ("critic.model.path=Qwen/Qwen2.5-3B-Instruct", "critic.grad_clip=1.0", "critic.ppo_epochs=4")
    translation = translate_words("algorithm.adv_estimator=gae", *words, "critic.cliprange_value=0.2")
    report = format_report(translation)
    otherwise = report[report.index("Different meaning") : report.index("Supported with this value only")]
    assert "critic.ppo_epochs" in otherwise and "one update per step of the run" in otherwise
    assert "critic.cliprange_value" in otherwise


@pytest.mark.parametrize(("side", "setting"), [("left", "right"), ("right", "left"), ("middle", "middle")])
def test_kept_side_becomes_removed_side(side: str, setting: str) -> None:
    turns = f"{ROLLOUT}.multi_turn"
    words = (f"{turns}.tool_config_path=t.yaml", f"{turns}.tool_response_truncate_side={side}")
    assert get_setting(translate_words(*words, f"{turns}.max_tool_response_length=99"), "result_limit") == {
        "chars": 99,
        "side": setting,
    }


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.train_batchsize=3", "unknown key\n  remedy: did you mean `data.train_batch_size`?"),
        (f"{ROLLOUT}.n=1", "nothing would be learned\n  remedy: write `actor_rollout_ref.rollout.n=8`, or `algorithm"),
        ("data.train_files=[3]", "3 is not a path"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=wsd", "remedy: write constant or cosine"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=300", "300 prompts do not divide data.train_batch_size 1024"),
        ("actor_rollout_ref.actor.loss_agg_mode=median", "unknown aggregation 'median'"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "unknown loss mode 'clip_cov'"),
        ("algorithm.adv_estimator=remax", "remedy: write one of grpo, "),
        ("algorithm.adv_estimator=rloo", "verl clips the updates of rloo after the first"),
        ("actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "turn one of them off"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
         "algorithm.kl_ctrl.type: 'adaptive' is not supported\n  remedy: write fixed"),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=abs",
         "unknown estimator 'abs'"),
        (f"{ROLLOUT}.temperature=0", "without sampling there is nothing to learn from"),
        (f"{ROLLOUT}.multi_turn.format=dialect {ROLLOUT}.multi_turn.tool_config_path=t.yaml",
         "unknown parser 'dialect'"),
        (f"{ROLLOUT}.multi_turn.enable=False {ROLLOUT}.multi_turn.tool_config_path=t.yaml",
         "turn it on, or remove them"),
        ("reward_model.enable=False reward.reward_model.enable=True", "conflicts with its value at"),
        (
            f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent {ROLLOUT}.multi_turn.tool_config_path=t.yaml",
            "default_agent_loop: is single_turn_agent, which has no tools, but tools or an interaction are named\n"
            "  remedy: write tool_agent, or remove them",
        ),
        ("algorithm.adv_estimator=gae critic.model.path=another",
         "remedy: remove it: the critic starts from the policy's weights"),
        ("algorithm.adv_estimator=gae critic.model.lora_rank=8", "critic.model.lora_rank: 8 is not supported"),
        ("algorithm.adv_estimator=gae critic.optim.lr_warmup_steps_ratio=0.1", "0.1 is not supported"),
        ("algorithm.adv_estimator=gae critic.grad_clip=0.5", "remove it: the policy's is used"),
        ("algorithm.adv_estimator=gae critic.optim.betas=[0.9,0.95]", "remove it: the policy's are used"),
        ("reward_model.reward_manager=batch", "define `compute_score(data_source, solution_str"),
        ("trainer.logger=swanlap", "unknown tracker 'swanlap'"),
        ("trainer.total_training_steps=null", "cannot compute the steps of 30 epochs"),
        ("data.train_batch_size=many", "'many' is not an integer"),
        ("+actor_rollout_ref.model.override_config.max_position_embeddings=64", "write it into the configuration"),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.1", "write it into the configuration"),
        ("recipe=vla", "the recipe 'vla' is not supported"),
        ("actor_rollout_ref.model.lora.target_modules=[linear_qkv]", "'linear_qkv' is a module of Megatron's models"),
        (f"{ROLLOUT}.top_p=1.5", "less than or equal to 1 (here: sampling.top_p)"),
    ],
)  # fmt: skip
def test_unsupported_value_is_refused_with_remedy(word: str, expected: str) -> None:
    words = word.split(" ")
    message = get_error(*words)
    assert expected in message
    assert message.startswith("the command line: "), message


def test_conflicting_spellings_of_a_key_are_refused() -> None:
    same = (f"{ROLLOUT}.multi_turn.tool_config_path=a.yaml", f"{ROLLOUT}.tool_kwargs.tools_config_file=a.yaml")
    assert get_setting(translate_words(*same), "tools") == ["a.yaml"]
    message = get_error(same[0], f"{ROLLOUT}.tool_kwargs.tools_config_file=b.yaml")
    assert "conflicts with its value at the command line" in message


def test_hub_names_are_kept_without_network_access(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    translation = translate_words("data.val_files=org/held-out")
    assert (translation.settings["model"], translation.settings["data"]) == ("Qwen/Qwen2.5-3B-Instruct", "org/data")


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
