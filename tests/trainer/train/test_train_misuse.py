"""Whatever is wrong with a training is told in words that mend it, before it costs anything."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.policy.lora
import trainer.policy.memory
from tests.trainer.train.jobs import ROOT, SMALL, model
from tests.trainer.train.trainings import NUMBERS, Run, checkpoints, config, measured, mine
from trainer.policy.policy import Policy
from trainer.run.file import Rollouts

# Numbers that are none.


@pytest.mark.parametrize(
    ("body", "more", "says"),
    [
        ("raise ValueError('no such column')", {}, "raised ValueError: no such column"),
        ("return '0.5'", {}, "gave '0.5', which is no number"),
        ("return math.nan", {}, "gave nan, which is no number"),
        ("time.sleep(20)", {"timeout_s": 0.05}, "gave nothing within 0.05 s"),
    ],
)
def test_where_nothing_can_be_scored_the_run_ends_after_three_steps_with_its_reasons(
    run: Run, caplog: pytest.LogCaptureFixture, body: str, more: dict[str, Any], says: str
) -> None:
    told = run("--config", config(reward=mine(body, **more)), "--out", "r", code=2)
    assert "4 of 4 rollouts have no reward, 4 of them by: component 'mine'" in told
    assert "nothing of the last 3 steps could be scored; of the last one:\n  4 x component 'mine'" in told
    assert says in told and "go on with --resume" in told and "Traceback" not in told
    assert [line["rollout/lost"] for line in measured("r")] == [4, 4, 4]
    assert all(rollout.reward is None for rollout in Rollouts(Path("r"))), "lost, and not a reward of 0"
    assert caplog.text.count("not scored: ") == 3, "examples, not all of them"


def test_what_one_rollout_lacks_costs_that_rollout(run: Run) -> None:
    body = "if attempt.rollout.name.endswith('/0'): raise KeyError('x')\n    return float(len(attempt.answer) % 3)"
    run("--config", config(reward=mine(body), steps=2), "--out", "r")
    assert [(line["rollout/lost"], line["rollout/count"]) for line in measured("r")] == [(2, 2)] * 2
    assert len(Rollouts(Path("r"))) == 8


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('turn')", "mine raised KeyError: 'turn' ("),
        ("return None", "mine gave None, and no list of "),
        ("return [1.0]", "mine gave 1 weights for "),
    ],
)
def test_rounds_of_one_s_own_that_go_wrong_end_the_run_with_their_name_and_it_goes_on_once_they_are_mended(
    run: Run, body: str, says: str
) -> None:
    file = rounds(body)
    run_file = config(steps=1, algorithm={"name": "dapo", "credit": {"rounds": f"{file}:mine"}})
    told = run("--config", run_file, "--out", "r", code=2)
    assert "mtrl-train: algorithm.credit.rounds: rollout 1-0-0/" in told and says in told
    assert "remedy: mend that function, and go on with --resume" in told and "Traceback" not in told
    assert len(Rollouts(Path("r"))) == 4, "what was over is saved"
    Path(file).write_text("def mine(ledger):\n    return ledger.mask\n")
    sys.modules.pop(Path(file).stem)
    run("--resume", "--out", "r")
    assert [line["step"] for line in measured("r")] == [1]


def rounds(body: str) -> str:
    """A function of the user's own that weighs tokens."""
    name = f"rounds_{next(NUMBERS)}.py"
    Path(name).write_text(f"def mine(ledger):\n    {body}\n")
    return name


def test_that_the_engine_is_exact_is_said_once(run: Run) -> None:
    told = run(
        "--config",
        config(steps=2, update={**SMALL["update"], "epochs": 2}, reward=mine("return float(attempt.rollout.index)")),
        "--out",
        "r",
    )
    assert told.count("no pass for the old policy's") == 1


def test_adapters_are_merged_where_it_learns_and_hold_up_no_rollouts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, real = [], trainer.policy.lora.merged

    def merged(given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(given)

    monkeypatch.setattr(trainer.policy.lora, "merged", merged)
    run("--config", config(steps=2, update={**SMALL["update"], "lora": {"rank": 2}}), "--out", "r")
    assert [name for name in threads if name.startswith("learning")] == ["learning_0"] * 2
    assert threads[-2:] == ["learning_0"] * 2, "after the first step nothing is merged elsewhere"


def poisoned(weights: Any) -> None:
    with torch.no_grad():
        next(weights.parameters()).fill_(math.nan)


def test_weights_that_are_no_numbers_end_the_run_and_take_no_checkpoint_s_place(run: Run, place: Path) -> None:
    from trainer.model import load_model

    shutil.copytree(model(), "poisoned")
    weights = load_model("poisoned")
    poisoned(weights)
    weights.save_pretrained("poisoned")
    told = run("--config", config(model="poisoned"), "--out", "r", code=2)
    assert "12 x engine_failed: the model's logits are not finite" in told and "`update.lr`" in told
    assert checkpoints("r") == []


def test_a_loss_that_is_no_number_names_its_rollout_and_moves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--config", config(steps=2, reward=mine("return float(attempt.rollout.index)")), "--out", "r")
    load = Policy.load

    def spoilt(*given: Any, **more: Any) -> Policy:
        policy = load(*given, **more)
        resume = policy.resume
        monkeypatch.setattr(policy, "resume", lambda folder: (resume(folder), poisoned(policy.model)))
        return policy

    monkeypatch.setattr(Policy, "load", spoilt)
    monkeypatch.setattr("trainer.engine.torch.engine.TorchEngine.publish", published)
    told = run("--resume", "--out", "r", "--steps", 3, code=2)
    assert "rollout 3-0-0/" in told and "nan" in told and "lower `update.lr`" in told and "Traceback" not in told
    assert checkpoints("r") == ["000001", "000002"] and len(measured("r")) == 2


async def published(*_: Any) -> None:
    """The engine keeps the weights that it began with."""


def test_a_learning_rate_that_leaves_no_numbers_is_refused(run: Run) -> None:
    told = run("--config", config(update={"lr": 1e30}), "--out", "r", code=2)
    assert "run.yaml:1: update.lr: expected less than or equal to 10, found 1e+30" in told


def test_groups_without_a_lesson_are_told_of_and_the_run_goes_on(run: Run) -> None:
    told = run("--config", config(reward=mine("return 1.0"), steps=2), "--out", "r")
    assert "no group teaches: within each, all rewards are the same" in told
    assert [line["groups/teaching"] for line in measured("r")] == [0, 0]
    assert checkpoints("r") == ["000001", "000002"]


def test_where_everything_is_cut_off_the_limit_is_named(run: Run) -> None:
    told = run("--config", config(limits={"turn_tokens": 3, "rollout_tokens": 160}, steps=1), "--out", "r")
    assert "100% of the rollouts are cut off, 100% by length_turn" in told and "raise `limits.turn_tokens`" in told


# What cannot begin.


def test_a_tokenizer_that_is_not_the_model_s_is_refused(run: Run) -> None:
    from trainer.model import load_model

    shutil.copytree(model(), "other")
    weights = load_model("other")
    weights.resize_token_embeddings(weights.config.vocab_size - 40)
    weights.save_pretrained("other")
    told = run("--config", config(model="other"), "--out", "r", code=2)
    assert "the tokenizer of 'other' has ids up to" in told and "copy the tokenizer" in told
    assert not Path("r").exists(), "nothing began, and nothing is left"


def test_a_template_that_rewrites_what_was_said_is_refused(run: Run) -> None:
    shutil.copytree(model(), "other")
    template = Path("other/chat_template.jinja")
    template.write_text(f"{{{{ messages | length }}}}{template.read_text()}")
    for words in ((), ("--dry-run",)):
        told = run("--config", config(model="other"), "--out", "r", *words, code=2)
        assert "the chat template cannot be trusted" in told and "`template.chat_template`" in told


def test_what_does_not_fit_into_memory_is_refused_with_its_knob(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.policy.memory, "free", lambda: 30_000_000)
    large = {**SMALL["update"], "chunk": 65536}
    told = run("--config", config(update=large), "--out", "r", code=2)
    assert "this run does not fit: memory: weights" in told and "remedy: lower `update.chunk` (logits" in told
    told = run("--config", config(update=large), "--dry-run", code=1)
    assert "it does not fit\n  remedy: lower `update.chunk` (logits" in told
    assert not Path("r").exists() and not Path("runs").exists()


def test_a_dry_run_shows_what_would_be_done_and_leaves_nothing(run: Run) -> None:
    told = run("--config", config(), "--out", "r", "--dry-run")
    for words in (
        '"prompts": 2',
        "memory: weights",
        "2 x 2 rollouts a step",
        "turn 0: policy",
        "nothing stands in its",
    ):
        assert words in told
    assert not Path("r").exists() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"promts": 4}, "run.yaml:1: promts: unknown key\n  remedy: did you mean `prompts`?"),
        ({"update": {"lora": {"rnk": 3}}}, "run.yaml:1: update.lora.rnk: unknown key\n  remedy: did you mean `rank`?"),
        (
            {"reward": {"components": {"a": {"function": "answer", "wight": 2}}}},
            "run.yaml:1: reward.components.a.wight: unknown key\n  remedy: did you mean `weight`?",
        ),
        (
            {"curriculum": {"stages": [{"tols": ["add"]}]}},
            "run.yaml:1: curriculum.stages[0].tols: unknown key\n  remedy: did you mean `tools`?",
        ),
        (
            {"reward": {"components": {"a": {"function": "anser"}}}},
            "run.yaml:1: reward.components.a.function: there is no function 'anser'\n  remedy: did you mean 'answer'?",
        ),
        ({"curriculum": {"stages": [{"tools": ["calcluate"]}]}}, "did you mean 'calculate'?"),
        ({"evaluation": {"data": "nosuch.jsonl"}}, "nosuch.jsonl: cannot be read (No such file"),
        ({"algorithm": {"credit": {"kind": "gae"}}}, "needs a critic\n  remedy: add `update.critic: {}`"),
        ({"sampling": {"temperature": 0}}, "temperature 0 cannot be learned from\n  remedy: raise"),
    ],
)
def test_a_slip_in_the_run_file_names_file_field_and_what_was_meant(
    run: Run, changes: dict[str, Any], says: str
) -> None:
    assert says in run("--config", config(**changes), "--out", "r", code=2)
    assert not Path("r/run.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--config", "nosuch"), "remedy: name a YAML file, or one of default, gsm8k, gsm8k_feedback"),
        (("--data", "rows.jsonl"), "a demo's model knows no words but its own tasks'\n  remedy: name a model"),
        (("--engine", "vllm"), "mtrl-train: --engine: should be auto, torch, "),
        (("--steps", "0"), "mtrl-train: --steps: expected greater than 0, found 0"),
        (("--tools", "nowhere"), "nowhere: there is no such folder"),
        (("--resume",), "runs: there is no run to go on with\n  remedy: name its folder with --out"),
        (("--resume", "--out", "nowhere"), "nowhere: is no training run"),
        (("eval", "nowhere"), "nowhere: is no training run"),
        (("plot", "nowhere"), "name the folder of a training run"),
        (("show", "nowhere", "0"), "name the folder of a run"),
        (("replay", "nowhere", "2"), "nowhere: is no training run"),
    ],
)
def test_a_slip_on_the_command_line_is_told_with_its_remedy(run: Run, words: tuple[str, ...], says: str) -> None:
    assert says in run(*words, code=2)


def test_a_slip_is_told_before_anything_heavy_is_imported(place: Path) -> None:
    code = (
        "import sys\nfrom trainer.cli import app\n"
        "try:\n    app(['--config', 'run.yaml'])\nexcept SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=config(promts=4), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "did you mean `prompts`?" in told.stderr and told.stdout == "heavy: []\n"
