"""A whole short run: its files, its losses and their determinism, evaluations, and resuming it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.demo.facts.facts_demo import build_model
from tests.metrics_page import describe_metric
from tests.trainer.algorithms.scored_groups import outcomes
from tests.trainer.train.jobs import SMALL, small_job
from tests.trainer.train.trainings import read_metrics_without_times, string_console, write_tools
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import read_metrics
from trainer.train.evaluate import Evaluation, compare_run, evaluate_model
from trainer.train.run_folder import RunFolder, load_run_settings
from trainer.train.start import train
from trainer.view.compare_runs import compare_runs


@pytest.fixture(scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    await train(small_job(), folder, string_console())
    return folder


def test_time_of_reward_functions_and_mix_of_kinds_are_metrics(run: Path) -> None:
    for metrics in read_metrics(run / "metrics.jsonl")[1:]:
        assert 0 <= metrics["time/rewards/outcome/mean_s"] <= metrics["time/rewards/outcome/max_s"]
        assert metrics["rollout/kind/fact"] + metrics["rollout/kind/sum"] == pytest.approx(1)


def test_every_metric_of_a_run_has_a_description(run: Path) -> None:
    names = {name for line in read_metrics(run / "metrics.jsonl") for name in line}
    assert [name for name in sorted(names) if describe_metric(name) is None] == []


async def test_run_folder_has_the_documented_files(run: Path) -> None:
    lines = read_metrics_without_times(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for name in ("reward/mean", "reward/outcome", "success/sampled", "loss", "entropy", "kl/old", "mismatch/max"):
        assert all(name in line for line in lines[1:]), name
    assert [("eval/greedy" in line) for line in lines] == [True, False, True, True]
    kept = RunFolder(run).load_settings()
    chosen = {"micro_batch_tokens": kept.update.micro_batch_tokens}  # By the memory that there is.
    assert chosen["micro_batch_tokens"] and kept == small_job(update=SMALL["update"] | chosen)
    assert sorted(one.name for one in (run / "checkpoints").iterdir()) == ["000002", "000003"]


async def test_success_before_and_after_is_compared(run: Path) -> None:
    given, words = load_run_settings(run), ("sampling.temperature=0.5",)
    update = {
        "sampling": given.sampling.model_copy(update={"temperature": 0.5}),
        "evaluation": given.evaluation.model_copy(update={"k": 3}),
    }
    cooler = given.model_copy(update=update)
    comparison = await compare_run(run, 8, None, string_console(), changed=(cooler, words))
    report = comparison.summary
    for way in ("sampled", "greedy", "sampled_before", "greedy_before"):
        assert 0 <= report[way] <= 1 and report["intervals"][way][0] <= report[way] <= report["intervals"][way][1]
    assert report["by_kind"].keys() == {"fact", "sum"} and report["held_out"] and report["tasks"] == 8
    assert len(Rollouts(run / "eval" / "sampled")) == 24 and len(Rollouts(run / "eval" / "greedy")) == 8
    assert report["passes"].keys() == {"sampled", "sampled_before"}
    for passes in report["passes"].values():
        assert passes["pass@3"] >= passes["pass@2"] >= passes["pass^2"] >= passes["pass^3"]
    assert report["paired"]["greedy"]["difference"] == pytest.approx(report["greedy"] - report["greedy_before"])
    assert report["changes"] == [*words] and str(comparison.table.title).endswith("with sampling.temperature=0.5")
    console = string_console()
    console.print(comparison.table)
    assert "pass^3" in console.file.getvalue() and "task by task" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"nope\.jsonl"):
        await compare_run(run, 8, "./nope.jsonl", string_console())
    (sampled, greedy) = compare_runs(run, run).values()  # It was not moved for one that could not start.
    assert sampled.summary["tasks"] == 8 and not sampled.changed and not greedy.changed


async def test_model_alone_is_evaluated_and_judged_by_its_own_settings(tmp_path: Path) -> None:
    comparison = await evaluate_model(small_job(), 4, None, string_console(), tmp_path / "a")
    assert comparison.variants.keys() == {"sampled", "greedy"} and comparison.paired == {}
    assert comparison.summary["step"] is None and "before" not in str(comparison.table.title)
    stored = Rollouts(tmp_path / "a" / "eval" / "greedy")
    assert len(stored) == 4 and {turn.version for one in stored for turn in one.turns} == {0}
    await evaluate_model(small_job(reward={"success_at": -1}), 4, None, string_console(), tmp_path / "b")
    with pytest.raises(ConfigError, match=r"nope\.jsonl"):
        await evaluate_model(small_job(), 4, "./nope.jsonl", string_console(), tmp_path / "a")
    greedy = compare_runs(tmp_path / "a", tmp_path / "b")["greedy"]
    assert greedy.summary["first"] == comparison.variants["greedy"].all.value and greedy.summary["second"] == 1


async def test_evaluations_during_a_run_tell_pass_at_k_and_pass_hat_k(tmp_path: Path) -> None:
    evaluation = {"every": 1, "rows": 3, "k": 2}
    await train(small_job(evaluation=evaluation, steps=1, prompts=2, n=2), tmp_path / "run", string_console())
    for metrics in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["eval/pass^k"] <= metrics["eval/sampled"] <= metrics["eval/pass@k"]
        assert metrics["eval/tasks"] == 3 and metrics["eval/lost_tries"] == 0
        assert all(describe_metric(name) for name in metrics)


def test_pass_at_k_is_told_only_of_that_k() -> None:
    tried_twice = Evaluation.from_groups([outcomes(1.0, 0.0)], lost=2)
    assert tried_twice.tries_metrics(4) == {"eval/lost_tries": 2.0, "eval/sampled": 0.5}
    assert tried_twice.tries_metrics(2).keys() >= {"eval/pass@k", "eval/pass^k"}
    assert Evaluation.from_groups([], lost=4).tries_metrics(4) == {"eval/lost_tries": 4.0}


async def test_untrained_weights_are_evaluated_also_by_an_engine_that_shares_the_trainers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs: list[list[float]] = []
    for smallest in (10**9, 0):
        monkeypatch.setattr("trainer.engine.torch.choose_holding.MIN_SHARED", smallest)
        await compare_run(run, 4, None, string_console())
        for name in ("greedy_before", "greedy"):
            stored = Rollouts(run / "eval" / name)
            logprobs.append([value for one in stored for value in one.ledger.logprobs])
    (before, after), shared = logprobs[:2], logprobs[2:]
    assert shared == [pytest.approx(before, abs=1e-4), pytest.approx(after, abs=1e-4)]
    assert before != pytest.approx(after, abs=1e-4)


LUCK = """
import random
import numpy
import torch

def luck(attempt):
    return random.randrange(1000) + numpy.random.randint(1000) + int(torch.randint(1000, ()))
"""


async def test_random_reward_is_the_same_after_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """It is measured and rewards nothing: which rollout has which number is up to who comes first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(LUCK)
    write_tools(tmp_path)
    rewards = {"outcome": {"function": "outcome"}, "luck": {"function": "own.py:luck", "weight": 0}}
    settings = small_job(
        tools="tools", demo={"kinds": ["fact"]}, steps=3, evaluation={"every": 0}, reward={"components": rewards}
    )
    run, console = tmp_path / "run", string_console()
    await train(settings, run, console)

    def luck() -> list[float]:
        return [json.loads(line)["reward/luck"] for line in (run / "metrics.jsonl").read_text().splitlines()]

    whole = luck()
    assert len({*whole}) == 3
    shutil.rmtree(run / "checkpoints/000003")
    random.seed(0)
    await train(settings, run, console, resume=True)
    assert luck() == whole


REFERENCE_JOB: dict[str, Any] = {
    "steps": 8,
    "n": 8,
    "record": False,
    "reward": {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:sevenths"}}},
    "limits": SMALL["limits"] | {"turn_tokens": 16},
    "update": {"lr": 1e-2, "warmup_steps": 1, "lr_scheduler": "linear", "decay_steps": 8, "epochs": 2},
    "evaluation": {"every": 0},
}
LOSSES = [-0.0635213, 0.0022859, -0.0620649, -0.0224107, -0.0050541, -0.0055789, -0.0162345, -0.0510751]
ENTROPY, GRAD_NORM = 6.1260, 0.36153
"""After the last step."""


async def test_losses_of_a_short_run_are_the_known_ones_and_it_learns(tmp_path: Path, one_thread: None) -> None:
    model = build_model(tmp_path / "model")
    await train(small_job(**REFERENCE_JOB, model=str(model)), tmp_path / "run", string_console())
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step["loss"] for step in steps] == pytest.approx(LOSSES, rel=1e-4, abs=1e-6)
    assert steps[-1]["entropy"] == pytest.approx(ENTROPY, rel=1e-4)
    assert steps[-1]["update/grad_norm"] == pytest.approx(GRAD_NORM, rel=1e-4)
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3])
