"""verl's keys, in every spelling, become our settings; what would change the result is refused in its place."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from gateway.errors import ConfigError
from trainer.train.settings import TrainSettings
from trainer.verl.row import How
from trainer.verl.table import TABLE
from trainer.verl.told import report, run_file, table
from trainer.verl.translate import Translation, translate
from trainer.verl.written import of_words, written

LEAST = (
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
    "data.train_files=org/data",
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=10",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
)
AT = "actor_rollout_ref.rollout"


def of(*words: str) -> Translation:
    return translate(written(None, [*LEAST, *words]))


def at(found: Translation, ours: str) -> Any:
    value: Any = found.settings
    for name in ours.split("."):
        value = value.get(name) if value is not None else None
    return value


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        of(*words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "ours", "value"),
    [
        ("data.train_batch_size=512", "prompts", 512),
        ("data.val_files=['v.parquet']", "evaluation.data", "v.parquet"),
        ("data.val_max_samples=64", "evaluation.few", 64),
        ("data.seed=7", "seed", 7),
        ("data.train_files=['a','b']", "data", "a, b"),
        ("data.image_key=pictures", "columns", {"image_key": "pictures", "video_key": "videos"}),
        ("+data.apply_chat_template_kwargs.enable_thinking=False", "template.chat_template_kwargs",
         {"enable_thinking": False}),
        (f"{AT}.n=16", "n", 16),
        (f"{AT}.temperature=0.7", "sampling.temperature", 0.7),
        (f"{AT}.top_k=-1", "sampling.top_k", 0),
        (f"{AT}.multi_turn.tool_config_path=tools.yaml", "tools", ["tools.yaml"]),
        (f"{AT}.tool_kwargs.tools_config_file=tools.yaml", "tools", ["tools.yaml"]),
        (f"{AT}.multi_turn.interaction_config_path=user.yaml", "tools", ["user.yaml"]),
        (f"{AT}.interaction_config_file=user.yaml", "tools", ["user.yaml"]),
        (f"{AT}.multi_turn=True", "limits.assistant_turns", 512),
        (f"{AT}.multi_turn.enable=False", "limits.assistant_turns", 1),
        ("rollout.multiturn.max_turns=5 rollout.multiturn.enabled=true", "limits.assistant_turns", 5),
        (f"{AT}.multi_turn.tokenization_sanity_check_mode=ignore_strippable", "template.sanity", "ignore_strippable"),
        (f"{AT}.multi_turn.use_inference_chat_template=True", "template.history", "inference_template"),
        (f"{AT}.multi_turn.format=llama3_json {AT}.multi_turn.tool_config_path=t.yaml", "template.parser",
         "llama3_json"),
        (f"{AT}.engine_kwargs.sglang.attention_backend=fa3", "serving.options", ["--attention-backend", "fa3"]),
        ("data.max_response_length=3072 data.max_prompt_length=1024", "limits.rollout_tokens", 4096),
        (f"{AT}.max_model_len=800", "limits.rollout_tokens", 800),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=128", "update.minibatches", 8),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000", "update.tokens", 24000),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "update.tokens", 4096),
        ("actor_rollout_ref.actor.optim.lr=2e-6", "update.lr", 2e-6),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.2", "update.warmup", 8),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=3 actor_rollout_ref.actor.ppo_epochs=2", "update.warmup", 24),
        ("data.shuffle=False", "curriculum.shuffled", False),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "update.fall", "cosine"),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", "update.floor", 0.0),
        ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=32", "update.lora",
         {"rank": 8, "alpha": 32}),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "algorithm.aggregate", "sequence"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.length", 512),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "algorithm.clip_low", 0.3),
        ("actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_high=0.4", "algorithm.clip_high",
         0.4),
        ("actor_rollout_ref.actor.clip_ratio_c=10.0", "algorithm.clip_dual", 10.0),
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl",
         {"coefficient": 0.001, "estimator": "k3", "place": "loss"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl",
         {"coefficient": 0.01, "estimator": "k1", "place": "reward"}),
        ("algorithm.adv_estimator=rloo data.train_batch_size=256", "algorithm.name", "rloo"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.name", "reinforce_pp"),
        ("algorithm.adv_estimator=gae algorithm.lam=0.95", "algorithm.credit",
         {"kind": "gae", "discount": 1.0, "trust": 0.95}),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.name", "dr_grpo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algorithm.name", "gspo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algorithm.aggregate", "sequence"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "algorithm.aggregate", "token"),
        ("actor_rollout_ref.actor.freeze_vision_tower=True", "update.vision", "frozen"),
        ("actor_rollout_ref.actor.freeze_vision_tower=False", "update.vision", None),
        (f"{AT}.agent.default_agent_loop=tool_agent {AT}.multi_turn.tool_config_path=t.yaml", "tools", ["t.yaml"]),
        (f"{AT}.agent.default_agent_loop=single_turn_agent {AT}.multi_turn.enable=True", "limits.assistant_turns", 1),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.mismatch", {"truncate": "token", "cap": 2.0}),
        ("algorithm.rollout_correction.rollout_rs=geometric algorithm.rollout_correction.rollout_rs_threshold=4.0",
         "algorithm.mismatch", {"reject": "geometric", "high": 4.0, "low": 0.25}),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=5", "algorithm.mismatch", {"truncate": "token", "cap": 5}),
        ("algorithm.filter_groups.enable=True", "algorithm.dynamic", True),
        ("algorithm.filter_groups.max_num_gen_batches=5", "draws", 5),
        ("reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=128", "algorithm.overlong",
         {"limit": 512, "margin": 128, "cost": 1.0}),
        ("custom_reward_function.path=r.py custom_reward_function.name=mine", "reward.components",
         {"custom": {"function": "trainer.verl.reward:custom", "args": {"path": "r.py", "name": "mine"}}}),
        ("reward.custom_reward_function.path=r.py +reward.custom_reward_function.reward_kwargs.strict=True "
         "reward.num_workers=4 reward.reward_manager.name=naive", "reward.components",
         {"custom": {"function": "trainer.verl.reward:custom",
                     "args": {"path": "r.py", "name": "compute_score", "kwargs": {"strict": True}}}}),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64",
         "algorithm.overlong", {"limit": 512, "margin": 64, "cost": 1.0}),
        ("trainer.total_training_steps=33", "steps", 33),
        ("trainer.default_local_dir=runs/mine", "out", "runs/mine"),
        ("trainer.save_freq=20", "checkpoint.every", 20),
        ("trainer.max_actor_ckpt_to_keep=1", "checkpoint.keep", 2),
        ("trainer.test_freq=5", "evaluation.every", 5),
        ('trainer.logger=["console","wandb"]', "report", ["wandb"]),
    ],
)  # fmt: skip
def test_a_key_becomes_a_setting(word: str, ours: str, value: Any) -> None:
    found = of(*word.split(" "))
    assert at(found, ours) == value
    TrainSettings.model_validate(found.settings)


def test_what_is_left_out_is_as_verl_has_it() -> None:
    found = of()
    for ours, value in {
        "prompts": 1024, "n": 1, "update.lr": 1e-6, "update.weight_decay": 0.01, "update.betas": [0.9, 0.999],
        "update.checkpointing": True, "update.minibatches": 4, "algorithm.aggregate": "token",
        "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "algorithm.clip_dual": 3.0, "algorithm.kl": None,
        "limits.assistant_turns": 1, "limits.user_turns": 0, "tools": [], "evaluation.every": 0, "draws": None,
    }.items():  # fmt: skip
        assert at(found, ours) == value, ours
    assert at(of(f"{AT}.multi_turn.tool_config_path=t.yaml"), "result_limit") == {"chars": 256, "side": "middle"}


def test_turns_are_limited_as_they_were_there() -> None:
    tools, turns = f"{AT}.multi_turn.tool_config_path=t.yaml", f"{AT}.multi_turn"
    found = of(tools, f"{turns}.max_user_turns=5", f"{turns}.max_assistant_turns=20")
    assert (at(found, "limits.assistant_turns"), at(found, "limits.user_turns")) == (6, 5)
    found = of(tools, f"{turns}.max_assistant_turns=20", f"{turns}.max_parallel_calls=4")
    limits = found.settings["limits"]
    assert (limits["assistant_turns"], limits["user_turns"], limits["tool_calls"]) == (20, 20, 80)
    unlimited = of(tools)
    assert at(unlimited, "limits.assistant_turns") == at(unlimited, "limits.turn_tokens") == 512


def test_gspo_has_the_mean_of_its_own_whatever_is_written() -> None:
    mean = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
    found = of("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", mean)
    assert (at(found, "algorithm.aggregate"), at(found, "algorithm.length")) == ("sequence", None)
    told = next(line for line in report(found).splitlines() if "loss_agg_mode" in line)
    assert "-> algorithm.aggregate: sequence" in told and "gspo's is `sequence`" in told


def test_what_a_critic_would_be_told_matters_only_where_there_is_one() -> None:
    words = ("critic.model.path=another", "critic.optim.lr_warmup_steps_ratio=0.1", "critic.model.lora_rank=8")
    assert at(of(*words), "update.critic") is None
    told = report(of("algorithm.adv_estimator=gae", "critic.model.path=Qwen/Qwen2.5-3B-Instruct",
                     "critic.grad_clip=1.0", "critic.ppo_epochs=4", "critic.cliprange_value=0.2"))  # fmt: skip
    otherwise = told[told.index("Otherwise here") : told.index("As it has to be here")]
    assert "critic.ppo_epochs" in otherwise and "one step for each step of the run" in otherwise
    assert "critic.cliprange_value" in otherwise


@pytest.mark.parametrize(("theirs", "ours"), [("left", "right"), ("right", "left"), ("middle", "middle")])
def test_the_side_that_was_kept_becomes_the_side_that_is_cut(theirs: str, ours: str) -> None:
    turns = f"{AT}.multi_turn"
    words = (f"{turns}.tool_config_path=t.yaml", f"{turns}.tool_response_truncate_side={theirs}")
    assert at(of(*words, f"{turns}.max_tool_response_length=99"), "result_limit") == {"chars": 99, "side": ours}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.train_batchsize=3", "is no key that is known here\n  remedy: did you mean `data.train_batch_size`?"),
        ("data.truncation=left", "a prompt that is cut is another task\n  remedy: write `data.truncation=error`"),
        ("data.train_files=[3]", "3 is no path"),
        ("data.prompt_key=question", "remedy: name the column `prompt`"),
        ("data.sampler.class_path=s.py", "remedy: order tasks with the setting `curriculum`"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "remedy: write 0: entropy is told in the metrics"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=wsd", "remedy: write constant or cosine"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=300", "300 prompts do not divide the 1024"),
        ("actor_rollout_ref.actor.loss_agg_mode=median", "there is no mean 'median' here"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "there is no objective 'clip_cov' here"),
        ("algorithm.adv_estimator=remax", "remedy: write one of grpo, "),
        ("algorithm.adv_estimator=rloo", "verl clips rloo's steps after the first"),
        ("actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "turn one of the two off"),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.type: a coefficient that is 'adaptive'\n  remedy: write fixed",
        ),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=abs", "no estimator 'abs'"),
        (f"{AT}.temperature=0", "what is always sampled alike cannot be learned from"),
        (f"{AT}.val_kwargs.n=4", "remedy: leave it out; `evaluation.after`"),
        (f"{AT}.multi_turn.format=dialect {AT}.multi_turn.tool_config_path=t.yaml", "there is no parser 'dialect'"),
        (f"{AT}.multi_turn.enable=False {AT}.multi_turn.tool_config_path=t.yaml", "turn it on, or take them out"),
        (f"{AT}.agent.agent_loop_config_path=loop.yaml", "the setting `stepper`"),
        ("rollout.multiturn.environment.type=tool_calling", "multi_turn.tool_config_path"),
        ("actor_rollout_ref.model.trust_remote_code=True", "no code of a model's folder is run"),
        ("reward_model.enable=True", "ask that model in a function"),
        ("reward_model.reward_loop_source=importlib", "remedy: score in a function of yours: `custom_reward_function"),
        ("reward_model.reward_loop_module_path=loops.py", "remedy: score in a function of yours"),
        ("+actor_rollout_ref.actor.qat.enable=True", "actor_rollout_ref.actor.qat.enable: True cannot be had here"),
        ("+actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable: True cannot be had here"),
        ("reward_model.enable=False reward.reward_model.enable=True", "is also written at"),
        ("reward.reward_manager.source=importlib", "remedy: score in a function of yours: `custom_reward_function"),
        ("reward.reward_manager.module.path=managers.py", "remedy: score in a function of yours"),
        ("reward.reward_model.enable=True", "ask that model in a function"),
        ("reward.sandbox_fusion.url=http://box/run", "run programs in a function of yours"),
        ("reward_model.reward_loop_class_name=Loop", "remedy: score in a function of yours"),
        (f"{AT}.agent.default_agent_loop=my_agent", "'my_agent' cannot be had here"),
        (
            f"{AT}.agent.default_agent_loop=single_turn_agent {AT}.multi_turn.tool_config_path=t.yaml",
            "default_agent_loop: is single_turn_agent, which has no tools, but tools or an interaction are named\n"
            "  remedy: write tool_agent, or take them out",
        ),
        ("+actor_rollout_ref.ref.model.path=another", "the reference is the policy as it was in the beginning"),
        ("algorithm.adv_estimator=gae critic.model.path=another", "remedy: leave it out: it begins as the policy does"),
        ("algorithm.adv_estimator=gae critic.model.lora_rank=8", "critic.model.lora_rank: 8 cannot be had here"),
        ("algorithm.adv_estimator=gae critic.optim.lr_warmup_steps_ratio=0.1", "0.1 cannot be had here"),
        ("algorithm.adv_estimator=gae critic.grad_clip=0.5", "leave it out: it is the policy's"),
        ("algorithm.adv_estimator=gae critic.optim.betas=[0.9,0.95]", "leave it out: they are the policy's"),
        ("reward_model.reward_manager=batch", "define `compute_score(data_source, solution_str"),
        ("trainer.logger=swanlab", "nobody here tells 'swanlab'"),
        ("trainer.val_only=True", "remedy: run `mtrl-train eval RUN`"),
        ("trainer.total_training_steps=null", "how many steps 30 epochs are cannot be told"),
        ("data.train_batch_size=many", "'many' is no whole number"),
        (f"{AT}.top_p=1.5", "less than or equal to 1 (here: sampling.top_p)"),
    ],
)
def test_what_would_change_the_result_is_refused_with_a_remedy(word: str, told: str) -> None:
    words = word.split(" ")
    message = refusal(*words)
    assert told in message
    assert message.startswith("the command line: "), message


def test_all_mistakes_are_told_at_once_each_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        dedent("""
        data:
          truncation: left
          shufle: true
        actor_rollout_ref:
          actor:
            entropy_coeff: 0.01
        """)
    )
    with pytest.raises(ConfigError) as caught:
        translate(written(Path("run.yaml"), LEAST))
    message = str(caught.value)
    assert "run.yaml:3: data.truncation: " in message
    assert "run.yaml:4: data.shufle: is no key" in message
    assert "run.yaml:7: actor_rollout_ref.actor.entropy_coeff: " in message


def test_two_spellings_of_one_key_must_say_one_thing() -> None:
    same = (f"{AT}.multi_turn.tool_config_path=a.yaml", f"{AT}.tool_kwargs.tools_config_file=a.yaml")
    assert at(of(*same), "tools") == ["a.yaml"]
    message = refusal(same[0], f"{AT}.tool_kwargs.tools_config_file=b.yaml")
    assert "is also written at the command line, and says something else there" in message


def test_a_hub_name_is_passed_on_and_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    found = of("data.val_files=org/held-out")
    assert (found.settings["model"], found.settings["data"]) == ("Qwen/Qwen2.5-3B-Instruct", "org/data")


def test_the_run_file_says_what_was_translated_and_reads_back_the_same() -> None:
    found = of(f"{AT}.multi_turn.tool_config_path=a b/t.yaml", "actor_rollout_ref.actor.use_kl_loss=True",
               "+data.apply_chat_template_kwargs.enable_thinking=False", "trainer.logger=wandb")  # fmt: skip
    text = run_file(found)
    assert yaml.safe_load(text.replace("1e-06", "1.0e-06")) == found.settings
    assert "prompts: 1024  # data.train_batch_size" in text


def test_the_report_tells_of_every_key_that_was_written() -> None:
    words = (f"{AT}.multi_turn.max_parallel_calls=2", "ray_kwargs.ray_init.num_cpus=4", "trainer.critic_warmup=0")
    found = of(*words)
    told = report(found)
    for word in (*LEAST, *words):
        assert word.partition("=")[0] in told
    for title in ("The same here", "Otherwise here, and why", "As it has to be here", "Nothing to set"):
        assert title in told
    assert "every call of a turn is carried out and answered" in told


def test_the_table_names_each_key_once_and_each_setting_exists() -> None:
    names = [name for row in TABLE for name in row.theirs]
    assert len(names) == len(set(names))
    for row in TABLE:
        fields: Any = TrainSettings.model_fields
        for step in filter(None, row.ours.split(".")):
            assert step in fields, row.ours
            inner = fields[step].annotation
            inner = inner if isinstance(inner, type) else inner.__args__[0]
            fields = getattr(inner, "model_fields", {})
        assert row.why or row.ours or row.how is How.REFUSED, row.name
    lines = table().splitlines()
    assert len(lines) == len(TABLE) + 2
    assert all(line.startswith("| ") and line.endswith(" |") for line in (lines[0], *lines[2:]))


def test_a_whole_command_is_taken_as_it_is_typed() -> None:
    found = translate(of_words(["python3", "-m", "verl.trainer.main_ppo", *LEAST, "data.train_batch_size=512"]))
    assert found.settings["prompts"] == 512
