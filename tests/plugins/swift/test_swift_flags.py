"""Tests the translation of `swift rlhf` and `swift rollout` commands and scripts, and errors for unsupported flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.scripts.script_reader import is_swift
from mtrl_plugins.scripts.translate import Translation, format_report, format_run_file, translate
from mtrl_plugins.swift.conversions import SWIFT_TABLE
from mtrl_plugins.swift.read_script import read_command
from tests.conftest import Write
from trainer.algorithms.settings import MismatchSettings
from trainer.ledger import Author, Entry, Ledger
from trainer.load_plugin import load_object
from trainer.train.settings import TrainSettings

MINIMAL = (
    "swift rlhf --rlhf_type grpo --model m --dataset rows.jsonl --reward_funcs format --max_steps 12 "
    "--lr_scheduler_type constant --per_device_train_batch_size 8"
)
SCRIPT = """\
    SYSTEM='You play.
    Be brief.'
    # swift rollout --model old
    NPROC_PER_NODE=2 \\
    swift rlhf \\
        --rlhf_type grpo \\
        --model m \\
        --tuner_type full \\
        --dataset rows.jsonl \\
        --system "$SYSTEM" \\
        --external_plugins plugin.py \\
        --reward_funcs mine format \\
        --reward_weights 1 0.5 0.25 \\
        --use_vllm true \\
        --per_device_train_batch_size 4 \\
        --gradient_accumulation_steps 2 \\
        --steps_per_generation 4 \\
        --num_generations 8 \\
        --max_steps 20 --num_iterations 1 \\
        --lr_scheduler_type linear \\
        --temperature 1.0 \\
        --beta 0 \\
        --loss_scale default \\
        --report_to tensorboard swanlab
"""
SERVER_SCRIPT = """\
    CUDA_VISIBLE_DEVICES=0 swift rollout --model m --multi_turn_scheduler gym_scheduler --max_turns 3 \\
        --gym_env counts --vllm_max_model_len 2048 --external_plugins plugin.py
"""


def translate_flags(*words: str) -> Translation:
    return translate(read_command([*MINIMAL.split(), *words]), SWIFT_TABLE)


def make_script_settings(file: Path) -> Any:
    return TrainSettings.model_validate(translate(read_command([str(file)]), SWIFT_TABLE).settings)


def make_settings(*words: str) -> Any:
    return TrainSettings.model_validate(translate_flags(*words).settings)


def test_server_and_trainer_scripts_become_one_run(write: Write) -> None:
    server_script, train_script = write("rollout.sh", SERVER_SCRIPT), write("train.sh", SCRIPT.replace(" swanlab", ""))
    translation = translate(read_command([str(server_script), str(train_script)]), SWIFT_TABLE)
    settings = TrainSettings.model_validate(translation.settings)
    args = {"name": "gym_scheduler", "plugins": ["plugin.py"], "max_turns": 3, "gym_env": "counts"}
    assert (settings.stepper, settings.stepper_args) == ("mtrl_plugins.swift.stepper:named", args)
    assert (settings.prompts, settings.n, settings.update.minibatches, settings.steps) == (4, 8, 2, 10)
    assert (settings.update.decay_steps, settings.update.min_lr_ratio, settings.update.warmup_steps) == (20, 0.0, 0)
    assert (settings.limits.assistant_turns, settings.limits.rollout_tokens) == (3, 2048)
    assert settings.system == "You play.\nBe brief." and settings.update.lora is None
    rewards = settings.reward.components
    assert {name: component.weight for name, component in rewards.items()} == {
        "mine": 1,
        "format": 0.5,
        "gym_reward": 0.25,
    }
    assert rewards["mine"].args["plugins"] == ["plugin.py"] and rewards["mine"].batched
    assert "model -> model: m" in format_report(translation) and "Translated from ms-swift" in format_run_file(
        translation
    )


def test_unsupported_value_is_reported_with_its_line(write: Write) -> None:
    file = write("train.sh", SCRIPT.replace("swanlab", "swanlap"))
    with pytest.raises(ConfigError) as caught:
        translate(read_command([str(file)]), SWIFT_TABLE)
    assert "train.sh:24: report_to: unknown tracker 'swanlap'" in str(caught.value)


def test_flags_after_a_script_override_it(write: Write) -> None:
    file = write("train.sh", SCRIPT)
    translation = translate(
        read_command([str(file), "--report_to", "wandb", "--max-steps=4", "--reward_weights", "1", "1"]), SWIFT_TABLE
    )
    assert translation.settings["report"] == ["wandb"] and translation.settings["steps"] == 2


def test_missing_flags_have_ms_swifts_defaults() -> None:
    settings = make_settings()
    assert (settings.sampling.temperature, settings.n, settings.prompts) == (0.9, 8, 2)
    assert (settings.update.lr, settings.update.betas, settings.update.weight_decay) == (1e-4, (0.9, 0.95), 0.1)
    assert (settings.update.lora.rank, settings.update.lora.alpha) == (8, 32)
    assert (settings.algorithm.kl.coefficient, settings.algorithm.aggregate) == (0.04, "sequence")
    assert settings.algorithm.credit.trained_turns == "mtrl_plugins.swift.loss_scale:last_round"
    assert settings.limits.assistant_turns == 1 and settings.tools == () and settings.columns.drop_answer
    assert (settings.update.warmup_steps, settings.update.freeze_vision) == (0, True)
    assert (settings.sampling.top_k, settings.sampling.top_p) == (0, 1.0)


RELEASES = {
    "--train_type lora": ("", 50, 0.9),
    "--external_plugins plugin.py": ("from swift.plugin import orms\n", 50, 0.9),
    "--external_plugins plugin.py --top_p 0.8": ("import swift.llm as llm\n", 50, 0.8),
    "--external_plugins other.py plugin.py": ("from swift.rewards import orms\n", 0, 1.0),
    "--tuner_type full --external_plugins plugin.py": ("from swift.plugin import orms\n", 0, 1.0),
}


@pytest.mark.parametrize("words", RELEASES)
def test_sampling_defaults_depend_on_the_release(words: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    text, top_k, top_p = RELEASES[words]
    monkeypatch.chdir(write("plugin.py", text).parent)
    sampling = make_settings(*words.split()).sampling
    assert (sampling.top_k, sampling.top_p) == (top_k, top_p)
    source = "default of release 3" if top_k else "default since 4.0.3; 50 before"
    assert f"top_k -> sampling.top_k: {top_k} ({source})" in format_report(translate_flags(*words.split()))


def test_vision_encoder_is_frozen_by_default(tmp_path: Path) -> None:
    expected = "freeze_vit -> update.freeze_vision: true (ms-swift's default)"
    assert expected not in format_report(translate_flags("--tuner_type", "full"))
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert expected in format_report(translate_flags("--tuner_type", "full", "--model", str(tmp_path)))
    assert make_settings("--freeze_vit", "true", "--freeze_aligner", "true").update.freeze_vision
    assert make_settings("--freeze_vit", "false", "--freeze_aligner", "false").update.freeze_vision is False


def test_system_message_is_text_or_file(tmp_path: Path) -> None:
    (file := tmp_path / "prompt.txt").write_text("You play.\nBe brief.\n", encoding="utf-8")
    assert make_settings("--system", str(file)).system == "You play.\nBe brief.\n"
    assert make_settings("--system", r"You play.\nBe brief.").system == "You play.\nBe brief."


LOSSES = {
    "--loss_type dapo --epsilon_high 0.28": {"name": "grpo", "aggregate": "token", "clip_high": 0.28},
    "--loss_type dr_grpo --scale_rewards none": {"name": "dr_grpo", "aggregate": 512},
    "--importance_sampling_level sequence": {"name": "gspo", "clip_low": 0.2},
    "--loss_type cispo --epsilon_high 5": {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregate": "token"},
    "--advantage_estimator rloo": {"name": "rloo"},
    "--advantage_estimator reinforce_plus_plus": {"name": "reinforce_pp_baseline", "aggregate": "sequence"},
    "--advantage_estimator reinforce_plus_plus --scale_rewards batch": {"name": "reinforce_pp_baseline"},
    "--delta 2.5": {"clip_dual": 2.5},
    "--beta 0": {"mismatch": MismatchSettings(truncate="never").model_dump()},
}


@pytest.mark.parametrize("words", LOSSES)
def test_loss_flags_become_the_same_loss(words: str) -> None:
    algorithm = make_settings(*words.split()).algorithm.model_dump()
    assert {name: algorithm[name] for name in LOSSES[words]} == LOSSES[words]


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("", 1), ("--sequence_parallel_size 2", 2), ("--sequence_parallel_size 1 --context_parallel_size 4", 4)],
)
def test_ranks_share_rows_as_there(words: str, ranks: int) -> None:
    assert make_settings(*words.split()).distributed.context_parallel == ranks


LOSS_SCALES = {
    "default": "all",
    "all": "all",
    "last_round": "mtrl_plugins.swift.loss_scale:last_round",
    "hermes": "all",
    "last_round+hermes": "mtrl_plugins.swift.loss_scale:last_round",
    "ignore_empty_think": "mtrl_plugins.swift.loss_scale:default_ignore_empty_think",
    "last_round+ignore_empty_think": "mtrl_plugins.swift.loss_scale:last_round_ignore_empty_think",
}


def test_truncated_rollouts_weigh_nothing_with_overlong_filter() -> None:
    rounds = "mtrl_plugins.swift.loss_scale:last_round_overlong_filter"
    assert make_settings("--overlong_filter", "true").algorithm.credit.trained_turns == rounds
    weigh = load_object(rounds)
    asked = Entry(Author.TASK, (1, 2), ({"role": "user", "content": "?"},))
    for reason, weight in (("stop", 1.0), ("length", 0.0)):
        answer = Entry(Author.POLICY, (3, 4), logprobs=(-1.0, -1.0), version=0, finish_reason=reason)
        assert weigh(Ledger((asked, answer))) == (0.0, 0.0, weight, weight)


MEGATRON = (
    "megatron rlhf --rlhf_type grpo --model m --dataset rows.jsonl --reward_funcs format --train_iters 8 --lr 2e-6 "
    "--lr_decay_style cosine --min_lr 2e-7 --global_batch_size 32 --micro_batch_size 1 --steps_per_generation 4 "
    "--tensor_model_parallel_size 2 --finetune --bf16 true --clip_grad 0.5 --lr_warmup_fraction 0.25"
)


def test_megatron_flags_mean_what_they_mean_there() -> None:
    translation = translate(read_command(MEGATRON.split()), SWIFT_TABLE)
    settings = TrainSettings.model_validate(translation.settings)
    assert (settings.prompts, settings.n, settings.update.minibatches, settings.steps) == (16, 8, 4, 2)
    assert (settings.update.lr, settings.update.max_grad_norm, settings.update.warmup_steps) == (2e-6, 0.5, 2)
    assert settings.update.lora is None and settings.update.min_lr_ratio == pytest.approx(0.1)
    assert "tensor_model_parallel_size (" in format_report(translation).partition("Ignored")[2]
    plain = translate(read_command(MEGATRON.replace("--global_batch_size 32", "").split()), SWIFT_TABLE)
    assert (plain.settings["prompts"], plain.settings["update"]["minibatches"]) == (8, 4)


def test_several_generations_of_one_update_are_one_step() -> None:
    words = ["--per_device_train_batch_size", "2", "--steps_per_generation", "4", "--gradient_accumulation_steps", "8"]
    settings = make_settings(*words)
    assert (settings.prompts, settings.update.minibatches) == (2, 1)


def test_launcher_and_environment_give_the_number_of_processes(write: Write) -> None:
    flags = MINIMAL.partition("rlhf ")[2].partition("--per_device")[0] + "--per_device_train_batch_size 2"
    file = write("train.sh", f"NNODES=1 torchrun --nproc_per_node=4 --nnodes $((1 + 1)) swift/cli/rlhf.py {flags}\n")
    assert is_swift([str(file)])
    assert make_script_settings(file).prompts == 2
    exported = write("exported.sh", f"export NPROC_PER_NODE=8\nCUDA_VISIBLE_DEVICES=0 swift rlhf {flags}\n")
    assert make_script_settings(exported).prompts == 2


def test_one_flag_is_missing_without_data_or_steps(write: Write) -> None:
    write("other.txt", "")
    for words, field in ((["--dataset", "org/rows"], "max_steps"), (["--dataset", "org/rows#100"], "dataset")):
        command = [word for word in MINIMAL.split() if word not in ("--max_steps", "12")]
        with pytest.raises(ConfigError) as caught:
            translate(read_command([*command, *words]), SWIFT_TABLE)
        assert str(caught.value).count("remedy") == 1 and f"{field}: " in str(caught.value)


@pytest.mark.parametrize("scale", LOSS_SCALES)
def test_loss_scale_becomes_token_weights(scale: str) -> None:
    assert make_settings("--loss_scale", scale).algorithm.credit.trained_turns == LOSS_SCALES[scale]


REJECTED = {
    "--lr_scheduler_type polynomial": "write linear, cosine or constant",
    "--overlong_filter true --loss_scale default+ignore_empty_think": "cannot be combined with --overlong_filter",
    "--loss_type real": "unknown loss 'real'",
    "--loss_type cispo": "set epsilon_high to 5",
    "--loss_type cispo --epsilon_high 0.28": "epsilon_high: cispo caps weights at 0.28",
    "--advantage_estimator reinforce_plus_plus --scale_rewards group": "cannot be combined with another loss",
    "--system prompt.txt": "system: cannot be read: [Errno 2] No such file or directory: 'prompt.txt'",
    "--multi_turn_scheduler openenv_sheduler": "unknown scheduler 'openenv_sheduler'",
    "--freeze_vit false": "set --freeze_vit and --freeze_aligner to the same value",
    "--loss_scale mine": "unknown loss scale 'mine'",
    "--dataset rows.jsonl#100": "selects a part of its rows",
    "--num_generations 7": "16 completions cannot be divided into groups of 7",
    "--reward_weights 1 2": "2 weights for 1 rewards (format)",
    "--max_turn 3": "did you mean `max_turns`?",
    "--tuner_type longlora": "write --tuner_type lora, or full",
    "--torch_dtype float16": "write one of bfloat16, float32",
}


@pytest.mark.parametrize("words", REJECTED)
def test_unsupported_value_is_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate_flags(*words.split())
    assert REJECTED[words] in str(caught.value) and "the command line" in str(caught.value)


def test_unsupported_variable_is_refused_with_its_line(write: Write) -> None:
    file = write("train.sh", f"MAX_PIXELS=1003520 \\\n{MINIMAL}\n")
    with pytest.raises(ConfigError, match=r"train.sh:1: MAX_PIXELS: 1003520 is not supported"):
        translate(read_command([str(file)]), SWIFT_TABLE)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--stop_words <|im_end|>", ""),
        ("--stop_words <|im_end|> Observation:", "stop_words: 'Observation:' is not supported"),
        ('--columns {"question":"query"}', ""),
        ('--columns {"answer":"solution"}', "columns: 'answer' is not supported"),
        ("--max_pixels 1003520 --dataset text.jsonl", ""),
        ("--max_pixels 1003520 --dataset images.jsonl --model same", ""),
        ("--max_pixels 1003520 --dataset images.jsonl", "max_pixels: 1003520 is not supported"),
    ],
)
def test_flag_is_judged_by_what_this_data_and_model_would_feel(write: Write, flags: str, says: str) -> None:
    write("text.jsonl", '{"query": "what"}\n')
    write("images.jsonl", '{"query": "what", "images": ["a.png"]}\n')
    write("same/preprocessor_config.json", '{"max_pixels": 1003520}')
    try:
        translate_flags(*flags.split())
        told = ""
    except ConfigError as error:
        told = str(error)
    assert says in told and bool(says) == bool(told), told


def test_script_for_ms_swift_is_recognized(write: Write) -> None:
    assert is_swift([str(write("swift.sh", SCRIPT))]) and is_swift(MINIMAL.split())
    assert not is_swift([str(write("other.sh", "# swift rlhf\npython3 -m verl.trainer.main_ppo\n"))])
    assert not is_swift(["data.train_batch_size=4"])
