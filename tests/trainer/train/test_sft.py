"""Supervised fine-tuning on traces by the training loop: loss, resume, evaluation, and rows that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.cli_data import write_rows
from tests.trainer.train.trainings import Run
from trainer.model import load_model
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import read_metrics
from trainer.train.settings import TrainSettings

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}


def trace(word: str) -> dict[str, Any]:
    call = {"function": {"name": "look_up", "arguments": {"word": word}}}
    return {
        "messages": [
            {"role": "user", "content": f"What is a {word}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"{word}s are animals"},
            {"role": "assistant", "content": "#### animal"},
        ],
        "tools": [TOOL],
    }


WORDS = ("gnu", "cow", "hen", "elk", "yak", "bat")
CONFIG = {"tools": [], "checkpoint": {"every": 1, "keep": 9}, "concurrency": {"running_requests": 2}}


def write_job(**changes: Any) -> tuple[str, ...]:
    Path("run.json").write_text(json.dumps({**CONFIG, **changes}))
    data = write_rows("traces.jsonl", *map(trace, WORDS))
    return ("sft", "--config", "run.json", "--data", data, "--lr", "1e-3", "--batch", "2")


def test_loss_is_that_of_the_assistants_tokens_and_falls(run: Run, model: Path) -> None:
    job = write_job(curriculum={"shuffle": False})
    output = run(*job, "--model", model, "--epochs", "4", "--out", "runs/one")
    steps = read_metrics(Path("runs/one/metrics.jsonl"))
    assert len(steps) == 12 and "step 1 of 12; loss" in output
    assert not [name for name in steps[0] if name.startswith(("reward/", "success/", "mismatch/"))]
    first = [rollout for rollout in Rollouts(Path("runs/one")) if rollout.group.startswith("1-")]
    network, losses = load_model(model), []
    for rollout in first:
        ids, mask = torch.tensor(rollout.ledger.ids), torch.tensor(rollout.ledger.mask)
        logprobs = network(input_ids=ids[None]).logits[0].log_softmax(-1)
        losses += (-logprobs[:-1].gather(1, ids[1:, None])[:, 0])[mask[1:]].tolist()
    assert steps[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert steps[0]["tokens/trained"] == len(losses) == steps[0]["tokens/sampled"]


def test_resumed_run_reaches_the_same_weights(run: Run, model: Path) -> None:
    run(*write_job(), "--model", model, "--out", "runs/one")
    checkpoints = Path("runs/one/checkpoints")
    whole = load_file(checkpoints / "000003" / "model.safetensors")
    for name in ("000002", "000003"):
        shutil.rmtree(checkpoints / name)
    run("--resume", "--out", "runs/one")
    again = load_file(checkpoints / "000003" / "model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_row_that_cannot_be_read_back_is_named_before_anything_is_trained(run: Run, model: Path) -> None:
    job = write_job()
    broken = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<tool_call>\n{"}]}
    write_rows("traces.jsonl", trace("gnu"), broken)
    for words, code in ((("--dry-run",), 1), (("--out", "runs/one"), 2)):
        output = run(*job, "--model", model, *words, code=code)
        assert "traces.jsonl:2: messages[1]: is not read back as calls" in output
    assert not Path("runs/one/metrics.jsonl").exists()
    write_rows("traces.jsonl", trace("gnu"), {"messages": [{"role": "user", "content": "x"}]})
    assert "traces.jsonl:2" in run(*job, "--model", model, "--out", "runs/one", code=2)


def test_dry_run_shows_the_first_trace_by_token(run: Run, model: Path) -> None:
    output = run(*write_job(), "--model", model, "--dry-run")
    assert "6 tasks of traces.jsonl" in output and "supervised: each step learns 2 traces" in output
    assert "turn 1: policy" in output and "#### animal" in output and "no problems found" in output


def test_traces_are_no_tasks_to_evaluate_on(run: Run, model: Path) -> None:
    run(*write_job(), "--model", model, "--steps", "1", "--out", "runs/one")
    assert "name tasks with --data" in run("eval", "runs/one", code=2)
    algorithms = ({"name": "grpo"}, {"credit": {"kind": "turns"}}, {"dynamic_sampling": True})
    for settings in (
        {"evaluation": {"every": 1}}, {"n": 2}, {"mode": "asynchronous"}, *({"algorithm": each} for each in algorithms)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"`sft` needs|no tasks|no siblings"):
            TrainSettings.model_validate({"sft": {}, "model": "m", "data": "d", **settings})


def test_turns_to_learn_are_chosen_without_naming_the_algorithm(run: Run, model: Path) -> None:
    run(*write_job(), "--model", model, "--steps", "1", "--out", "runs/one", "algorithm.credit.trained_turns=last")
    [step] = read_metrics(Path("runs/one/metrics.jsonl"))
    assert 0 < step["tokens/trained"] < step["tokens/sampled"]


def test_source_of_traces_is_named_once_and_conditions_are_for_runs(run: Run, model: Path) -> None:
    job = write_job()
    assert "name either --data or --from" in run(*job, "--from", "runs/none", code=2)
    assert "runs/none: there is no such run\n  remedy: " in run("sft", "--from", "runs/none", code=2)
    Path("runs/new").mkdir(parents=True)
    assert "runs/new: the run has no rollouts\n  remedy: " in run("sft", "--from", "runs/new", code=2)
    assert "is for the rollouts of a run" in run(*job, "--model", model, "--where", "reward > 0", code=2)


def test_rollouts_of_a_run_are_learned_with_its_model_and_tools(run: Run, model: Path) -> None:
    run(*write_job(), "--model", model, "--steps", "1", "--out", "runs/one")
    Path("run.json").write_text(json.dumps({"concurrency": {"running_requests": 2}}))
    done = run("sft", "--config", "run.json", "--from", "runs/one", "--where", "calls > 0", "--out", "runs/two")
    assert "1 step is finished" in done
    first, second = (list(Rollouts(Path(name))) for name in ("runs/one", "runs/two"))
    assert {rollout.ledger.ids for rollout in second} == {rollout.ledger.ids for rollout in first}
