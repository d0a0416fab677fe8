"""`swift rlhf` and `swift rollout`, typed or in scripts, become a run file; what would change the result is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from trainer.flags.table import SWIFT
from trainer.flags.written import is_swift, of_words
from trainer.train.settings import TrainSettings
from trainer.verl.told import report, run_file, table
from trainer.verl.translate import Translation, translate

LEAST = (
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
SERVES = """\
    CUDA_VISIBLE_DEVICES=0 swift rollout --model m --multi_turn_scheduler gym_scheduler --max_turns 3 \\
        --gym_env counts --vllm_max_model_len 2048 --external_plugins plugin.py
"""


def told(*words: str) -> Translation:
    return translate(of_words([*LEAST.split(), *words]), SWIFT)


def set_by(*words: str) -> Any:
    return TrainSettings.model_validate(told(*words).settings)


def test_a_server_and_its_trainer_become_one_run(write: Write) -> None:
    serves, trains = write("rollout.sh", SERVES), write("train.sh", SCRIPT.replace(" swanlab", ""))
    found = translate(of_words([str(serves), str(trains)]), SWIFT)
    settings = TrainSettings.model_validate(found.settings)
    args = {"name": "gym_scheduler", "plugins": ["plugin.py"], "max_turns": 3, "gym_env": "counts"}
    assert (settings.stepper, settings.stepper_args) == ("trainer.swift.stepper:named", args)
    assert (settings.prompts, settings.n, settings.update.minibatches, settings.steps) == (4, 8, 2, 10)
    assert (settings.update.steps, settings.update.floor, settings.update.warmup) == (20, 0.0, 0)
    assert (settings.limits.assistant_turns, settings.limits.rollout_tokens) == (3, 2048)
    assert settings.system == "You play.\nBe brief." and settings.update.lora is None
    rewards = settings.reward.components
    assert {name: one.weight for name, one in rewards.items()} == {"mine": 1, "format": 0.5, "gym_reward": 0.25}
    assert rewards["mine"].args["plugins"] == ["plugin.py"] and rewards["mine"].batched
    assert "model -> model: m" in report(found) and "Translated from ms-swift" in run_file(found)


def test_what_a_script_cannot_have_is_told_at_its_line(write: Write) -> None:
    file = write("train.sh", SCRIPT)
    with pytest.raises(ConfigError) as caught:
        translate(of_words([str(file)]), SWIFT)
    assert "train.sh:24: report_to: nobody here tells 'swanlab'" in str(caught.value)


def test_flags_behind_a_script_go_over_it(write: Write) -> None:
    file = write("train.sh", SCRIPT)
    found = translate(
        of_words([str(file), "--report_to", "wandb", "--max-steps=4", "--reward_weights", "1", "1"]), SWIFT
    )
    assert found.settings["report"] == ["wandb"] and found.settings["steps"] == 2


def test_what_is_left_out_is_as_ms_swift_has_it() -> None:
    settings = set_by()
    assert (settings.sampling.temperature, settings.n, settings.prompts) == (0.9, 8, 2)
    assert (settings.update.lr, settings.update.betas, settings.update.weight_decay) == (1e-4, (0.9, 0.95), 0.1)
    assert (settings.update.lora.rank, settings.update.lora.alpha) == (8, 32)
    assert (settings.algorithm.kl.coefficient, settings.algorithm.aggregate) == (0.04, "sequence")
    assert settings.algorithm.credit.rounds == "trainer.swift.scales:last_round"
    assert settings.limits.assistant_turns == 1 and settings.tools == () and settings.columns.drop_answer
    assert (settings.update.warmup, settings.update.vision) == (0, "frozen")
    assert (settings.sampling.top_k, settings.sampling.top_p) == (0, 1.0)


RELEASES = {
    "--train_type lora": ("", 50, 0.9),
    "--external_plugins plugin.py": ("from swift.plugin import orms\n", 50, 0.9),
    "--external_plugins plugin.py --top_p 0.8": ("import swift.llm as llm\n", 50, 0.8),
    "--external_plugins other.py plugin.py": ("from swift.rewards import orms\n", 0, 1.0),
    "--tuner_type full --external_plugins plugin.py": ("from swift.plugin import orms\n", 0, 1.0),
}


@pytest.mark.parametrize("words", RELEASES)
def test_what_is_sampled_from_is_as_the_release_has_it_and_is_told(
    words: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, top_k, top_p = RELEASES[words]
    monkeypatch.chdir(write("plugin.py", text).parent)
    sampling = set_by(*words.split()).sampling
    assert (sampling.top_k, sampling.top_p) == (top_k, top_p)
    why = "as release 3 has it" if top_k else "as releases since 4.0.3 have it; before, 50"
    assert f"top_k -> sampling.top_k: {top_k} (left out, and so {why})" in report(told(*words.split()))


def test_what_sees_is_frozen_and_a_model_that_sees_is_told_so(tmp_path: Path) -> None:
    said = "freeze_vit -> update.vision: frozen (left out, and so as all releases have it)"
    assert said not in report(told("--tuner_type", "full"))
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert said in report(told("--tuner_type", "full", "--model", str(tmp_path)))
    assert set_by("--freeze_vit", "true", "--freeze_aligner", "true").update.vision == "frozen"
    assert set_by("--freeze_vit", "false", "--freeze_aligner", "false").update.vision == "trained"


def test_a_system_message_is_words_or_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "prompt.txt").write_text("You play.\nBe brief.\n", encoding="utf-8")
    assert set_by("--system", str(file)).system == "You play.\nBe brief.\n"
    assert set_by("--system", r"You play.\nBe brief.").system == "You play.\nBe brief."


LOSSES = {
    "--loss_type dapo --epsilon_high 0.28": {"name": "grpo", "aggregate": "token", "clip_high": 0.28},
    "--loss_type dr_grpo --scale_rewards none": {"name": "dr_grpo", "aggregate": "constant", "length": 512},
    "--importance_sampling_level sequence": {"name": "gspo", "clip_low": 0.2},
    "--loss_type cispo --epsilon_high 5": {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregate": "token"},
    "--advantage_estimator rloo": {"name": "rloo"},
    "--advantage_estimator reinforce_plus_plus": {"name": "reinforce_pp_baseline", "aggregate": "sequence"},
    "--advantage_estimator reinforce_plus_plus --scale_rewards batch": {"name": "reinforce_pp_baseline"},
    "--delta 2.5": {"clip_dual": 2.5},
}


@pytest.mark.parametrize("words", LOSSES)
def test_a_loss_is_the_same_loss(words: str) -> None:
    algorithm = set_by(*words.split()).algorithm.model_dump()
    assert {name: algorithm[name] for name in LOSSES[words]} == LOSSES[words]


SCALES = {
    "default": "all",
    "all": "all",
    "last_round": "trainer.swift.scales:last_round",
    "hermes": "all",
    "last_round+hermes": "trainer.swift.scales:last_round",
    "ignore_empty_think": "trainer.swift.scales:default_ignore_empty_think",
    "last_round+ignore_empty_think": "trainer.swift.scales:last_round_ignore_empty_think",
}


@pytest.mark.parametrize("scale", SCALES)
def test_a_loss_scale_is_weights_of_tokens(scale: str) -> None:
    assert set_by("--loss_scale", scale).algorithm.credit.rounds == SCALES[scale]


REFUSED = {
    "--rlhf_type dpo": "rlhf_type: is 'dpo'",
    "--lr_scheduler_type polynomial": "write --lr_scheduler_type cosine, linear, or constant",
    "--overlong_filter true": "overlong_filter",
    "--loss_type real": "there is no loss 'real' here",
    "--loss_type cispo": "write --epsilon_high 5",
    "--loss_type cispo --epsilon_high 0.28": "epsilon_high: cispo weighs with 0.28 at the most",
    "--advantage_estimator reinforce_plus_plus --scale_rewards group": "goes with no other loss here",
    "--system prompt.txt": "system: cannot be read: [Errno 2] No such file or directory: 'prompt.txt'",
    "--multi_turn_scheduler openenv_scheduler": "no scheduler 'openenv_scheduler' comes with mtrl",
    "--freeze_vit false": "write --freeze_vit and --freeze_aligner alike",
    "--freeze_llm true": "the words are always learned",
    "--max_pixels 1003520": "write `max_pixels` into preprocessor_config.json",
    "--loss_scale mine": "there is no loss scale 'mine'",
    "--dataset rows.jsonl#100": "draws a part of its rows",
    "--num_generations 7": "16 completions at one time are no whole groups of 7",
    "--reward_weights 1 2": "2 weights for 1 rewards (format)",
    "--top_entropy_quantile 0.2": "all tokens are learned from",
    "--stop_words Observation:": "cut the turn in the scheduler's `step`",
    "--repetition_penalty 1.1": "repetition_penalty",
    "--max_turn 3": "did you mean `max_turns`?",
    "--tuner_type longlora": "write --tuner_type lora, or full",
    "--torch_dtype float16": "write --torch_dtype bfloat16",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_change_the_result_is_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        told(*words.split())
    assert REFUSED[words] in str(caught.value) and "the command line" in str(caught.value)


def test_a_variable_that_changes_what_is_seen_is_refused_at_its_line(write: Write) -> None:
    file = write("train.sh", f"MAX_PIXELS=1003520 \\\n{LEAST}\n")
    with pytest.raises(ConfigError, match=r"train.sh:1: MAX_PIXELS: 1003520 cannot be had here"):
        translate(of_words([str(file)]), SWIFT)


def test_every_flag_has_one_row_and_the_table_shows_them_all() -> None:
    names = [name for row in SWIFT.rows for name in row.theirs]
    assert len(names) == len(set(names))
    text = table(SWIFT)
    assert text.startswith("| ms-swift | mtrl |") and all(f"`{name}`" in text for name in names)


def test_whose_a_script_is_is_told_by_what_it_says(write: Write) -> None:
    assert is_swift([str(write("swift.sh", SCRIPT))]) and is_swift(LEAST.split())
    assert not is_swift([str(write("other.sh", "# swift rlhf\npython3 -m verl.trainer.main_ppo\n"))])
    assert not is_swift(["data.train_batch_size=4"])
