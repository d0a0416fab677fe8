"""Arguments of TRL's GRPOConfig become settings, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import yaml
from PIL import Image as Pillow

from gateway.errors import ConfigError, ConfigErrors
from gateway.types import Image
from mtrl_plugins.trl.api import GRPO
from mtrl_plugins.trl.conversions import not_truncated
from mtrl_plugins.trl.job_parts import read_arguments, translate_arguments
from mtrl_plugins.trl.rows import DatasetTasks, open_dataset
from tests.plugins.trl.scripted_grpo import Recorder, make_trainer, price, script_policy
from tests.trainer.cli_data import RunCommand
from trainer.ledger import Author, Entry, Ledger
from trainer.train.settings import TrainSettings


def settings(rows: int | None = 16, peft: Any = None, **args: Any) -> TrainSettings:
    return TrainSettings.model_validate(translate_arguments(args, peft, rows).settings)


def test_defaults_are_those_of_trl() -> None:
    made = settings()
    assert (made.n, made.prompts, made.steps, made.seed) == (8, 1, 48, 42)
    assert (made.algorithm.name, made.algorithm.aggregate) == ("dapo", "token")
    assert (made.algorithm.clip_low, made.algorithm.clip_high) == (0.2, 0.2)
    assert (made.update.lr, made.update.betas, made.update.min_lr_ratio) == (1e-6, (0.9, 0.999), 0.0)
    assert made.update.decay_steps == 48 and made.update.gradient_checkpointing and made.evaluation.every == 0
    assert (made.limits.response_tokens, made.limits.turn_tokens) == (512, 512)


@pytest.mark.parametrize(
    ("args", "prompts", "minibatches", "steps"),
    [
        ({"per_device_train_batch_size": 16, "max_steps": 5}, 2, 1, 5),
        ({"gradient_accumulation_steps": 4, "max_steps": 5}, 4, 1, 5),
        ({"steps_per_generation": 4, "max_steps": 8}, 4, 4, 2),
        ({"generation_batch_size": 64, "gradient_accumulation_steps": 2, "max_steps": 8}, 8, 4, 2),
        ({"num_iterations": 2, "max_steps": 8}, 1, 1, 4),
        ({"num_train_epochs": 2, "per_device_train_batch_size": 16}, 2, 1, 16),
    ],
)
def test_batches_and_steps(args: dict[str, Any], prompts: int, minibatches: int, steps: int) -> None:
    made = settings(**args)
    assert (made.prompts, made.update.minibatches, made.steps) == (prompts, minibatches, steps)


@pytest.mark.parametrize(
    ("args", "name", "aggregate", "bounds"),
    [
        ({"scale_rewards": False}, "dr_grpo", "token", (0.2, 0.2)),
        ({"scale_rewards": "batch"}, "reinforce_pp_baseline", "token", (0.2, 0.2)),
    ],
)
def test_losses(args: dict[str, Any], name: str, aggregate: str, bounds: tuple[float, float]) -> None:
    algorithm = settings(**args).algorithm
    assert (algorithm.name, algorithm.aggregate, (algorithm.clip_low, algorithm.clip_high)) == (name, aggregate, bounds)


def test_other_arguments() -> None:
    made = settings(
        peft=SimpleNamespace(r=4, lora_alpha=8, target_modules={"v_proj", "q_proj"}),
        beta=0.1, max_tool_calling_iterations=3, lr_scheduler_type="cosine", warmup_steps=0.5, max_steps=10,
        report_to=["wandb", "tensorboard"], save_total_limit=1, eval_strategy="steps", eval_steps=5, bf16=False,
        mask_truncated_completions=True, shuffle_dataset=False, chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    kl = made.algorithm.kl
    assert (kl.coefficient, kl.estimator, kl.importance) == (0.1, "k3+", "policy")
    assert made.limits.assistant_turns == 4 and made.update.lr_scheduler == "cosine" and made.update.warmup_steps == 5
    assert made.report == ("wandb",) and made.checkpoint.keep == 2 and made.evaluation.every == 5
    assert made.update.dtype == "float32" and made.update.lora is not None
    assert (made.update.lora.rank, made.update.lora.alpha, made.update.lora.target_modules) == (
        4,
        8.0,
        ("q_proj", "v_proj"),
    )
    assert made.algorithm.credit.trained_turns == "mtrl_plugins.trl.conversions:not_truncated"
    assert not made.curriculum.shuffle and made.template.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"vllm_importance_sampling_mode": "token_truncate"}, {"truncate": "token", "cap": 3.0}),
        ({}, {"truncate": "sequence", "reject": "sequence", "cap": 3.0, "bounds": (1e-6, 3.0)}),
        ({"vllm_importance_sampling_correction": False}, {"truncate": "never"}),
    ],
)
def test_the_mismatch_with_vllm(args: dict[str, Any], expected: dict[str, Any]) -> None:
    made = settings(use_vllm=True, **args).algorithm.mismatch
    assert made.model_dump(exclude_unset=True) == expected
    assert settings(**args).algorithm.mismatch.truncate == "auto"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"max_stepz": 3}, "did you mean `max_steps`"),
        ({"num_generations": 3}, "cannot be divided into groups of 3"),
        ({"loss_type": "sapo"}, "write one of grpo"),
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "write a loss_type of dapo"),
        ({"model_init_kwargs": {"revision": "x"}}, "save_pretrained"),
        ({"peft_config": SimpleNamespace(p=1)}, "LoraConfig"),
        ({"temperature": 0.0}, "above 0"),
        ({"rows": None}, "max_steps"),  # Of a stream, whose rows nobody has counted.
    ],
)
def test_what_is_not_here_is_refused_with_what_to_do(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings(**args)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as raised:
        settings(fp16=True, max_stepz=1, loss_type="vespo")
    assert len(raised.value.errors) == 3


class Schedule(StrEnum):
    COSINE = "cosine"


@dataclass
class Config:
    """Stands for a GRPOConfig: a dataclass that fills in values itself."""

    output_dir: str | None = None
    max_steps: int = -1
    lr_scheduler_type: Schedule | str = "linear"
    report_to: list[str] = field(default_factory=list)
    steps_per_generation: int | None = None
    not_known_here: int = 3

    def __post_init__(self) -> None:
        self.steps_per_generation = self.steps_per_generation or 1


def test_of_a_dataclass_only_what_differs_from_its_defaults_counts() -> None:
    config = Config("out", lr_scheduler_type=Schedule.COSINE)
    assert read_arguments(config) == {"output_dir": "out", "lr_scheduler_type": "cosine"}
    with pytest.raises(ConfigError, match="not_known_here"):
        translate_arguments(Config(not_known_here=4))


def test_arguments_of_another_kind_are_refused() -> None:
    assert read_arguments(SimpleNamespace(max_steps=3)) == {"max_steps": 3}
    with pytest.raises(ConfigError, match="GRPOConfig"):
        read_arguments("max_steps=3")


@pytest.mark.parametrize(("reason", "weights"), [("stop", [0.0, 1.0, 1.0]), ("length", [0.0, 0.0, 0.0])])
def test_truncated_rollouts_weigh_nothing_if_that_is_asked_for(reason: str, weights: list[float]) -> None:
    turn = Entry(Author.POLICY, (2, 3), ({"role": "assistant"},), logprobs=(0.0, 0.0), finish_reason=reason)
    assert not_truncated(Ledger((Entry(Author.TASK, (1,)), turn))) == weights


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


CHAT = [{"role": "user", "content": "What is it?"}]


def tasks(*rows: Any, **kwargs: Any) -> DatasetTasks:
    return DatasetTasks(open_dataset(rows, "train_dataset"), "train_dataset", **kwargs)


def test_columns_that_have_a_meaning_in_other_data_are_only_columns() -> None:
    row = {"prompt": CHAT, "id": 7, "tools": "[]", "answer": 3, "system": None, "messages": [], "extra_info": 1}
    first, second = tasks(row, row)
    assert first.messages == tuple(CHAT) and first.truth is None
    assert first.session_task.tools is None and dict(first.columns) == row
    assert second.id == f"{first.id}-2"


def test_a_data_set_of_datasets_is_read_row_by_row_with_its_images() -> None:
    picture = Pillow.new("RGB", (30, 30), "red")
    data = datasets.Dataset.from_dict({"prompt": [CHAT], "image": [picture], "note": [None]})
    (task,) = DatasetTasks(open_dataset(data.cast_column("image", datasets.Image()), "train_dataset"), "train_dataset")
    image, text = task.messages[0]["content"]
    assert isinstance(image["image"], Image) and text == {"type": "text", "text": "What is it?"}
    assert isinstance(task.columns["image"], Pillow.Image) and task.columns["note"] is None


def test_of_a_stream_as_many_rows_are_read_as_the_run_draws(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def stream() -> Iterator[dict[str, Any]]:
        for number in range(1000):
            drawn.append(number)
            yield {"prompt": CHAT, "number": number}

    script_policy(monkeypatch, [["done"]])
    trainer = make_trainer(model, stream(), Recorder(), args={"max_steps": 3})
    assert len(trainer._parts.train) == 3 and drawn == [0, 1, 2]
    with pytest.raises(ConfigError, match="set max_steps"):
        make_trainer(model, stream(), Recorder(), args={"max_steps": -1})


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "has no rows"),
        ([{"question": "?"}], r"train_dataset\[0\]: prompt: is missing"),
        ([{"prompt": 3}], "neither a text nor a list"),
        ([{"prompt": ["?"]}], "neither a text nor a list"),
        (["?"], "not a row with columns"),
        ([{"prompt": CHAT, "images": [b"no image"]}], r"train_dataset\[0\]: images\[0\]"),
        ([{"prompt": "half \ud83d"}], "surrogate"),
        ([{"prompt": "text"}, {"prompt": CHAT}], "some prompts are texts"),
        ({"train": []}, "several data sets"),
        ("org/name", "is a text"),
        (3, "is a int"),
    ],
)
def test_mistakes_in_data_are_named_with_their_row(rows: Any, problem: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_trainer(model, rows, Recorder())


def test_texts_have_no_place_for_tools_and_no_chat_template_applied(model: Path, place: Path) -> None:
    with pytest.raises(ConfigError, match="no place for tools"):
        make_trainer(model, [{"prompt": "The sky is"}], Recorder(), tools=[price])
    with pytest.raises(ConfigError, match=r"control token '<\|im_"):
        make_trainer(model, [{"prompt": "<|im_start|>user\nHi<|im_end|>"}], Recorder()).train()


@pytest.mark.parametrize(
    ("model", "problem"), [({}, "model: is a dict"), ("org/missing", "no hub is asked"), ("missing", "missing")]
)
def test_what_is_no_model_is_refused(model: Any, problem: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    trainer = GRPO(model, Recorder(), {"max_steps": 1}, [{"prompt": CHAT}])
    with pytest.raises(Exception, match=problem):
        trainer.train()
