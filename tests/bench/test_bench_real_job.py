"""The job of `make real`: its problems, and all its parts in small, with real tools and a scripted policy."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from rich.console import Console

import trainer.train.job
from mtrl_plugins.demo.problem import Split
from tests.trainer.model_folders import save_tiny_model
from tests.trainer.native_tools import native_tools
from tests.trainer.policy_scripts import encode_turns, render_calls
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.rollout.settings import BaseRolloutSettings
from trainer.setup import load_template
from trainer.storage.rollout_file import Rollouts

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from real_job import HELD_OUT_SEED, JOB, RealJob, Size, format_table, read_run_cost
from word_problems import WordProblem, draw_examples, draw_problems

SMALL = Size(held_out=6, training=24, sampled=12, start_epochs=1, start_batch=4, steps=2, prompts=3, n=4)


def some(seed: int, split: Split, count: int) -> list[WordProblem]:
    return [problem for _, problem in islice(draw_problems(seed, split), count)]


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    held = {str((problem.question, problem.facts)) for problem in some(HELD_OUT_SEED, "held_out", 200)}
    trained = {str((problem.question, problem.facts)) for seed in range(3) for problem in some(seed, "train", 600)}
    shown = {str(message["content"]) for chat in draw_examples(0).values() for message in chat}
    assert len(held) == 200 and not held & trained
    assert not {problem.question for problem in some(HELD_OUT_SEED, "held_out", 200) if not problem.facts} & shown
    assert some(1, "train", 12) == some(1, "train", 12) != some(2, "train", 12)


def turns_of(problem: WordProblem) -> list[str]:
    """What a perfect policy writes."""
    return [*(render_calls((call.tool, dict(call.arguments))) for call in problem.calls), f"#### {problem.answer}"]


@cache
def problems_by_name() -> dict[str, WordProblem]:
    train, held_out = some(0, "train", SMALL.training), some(HELD_OUT_SEED, "held_out", SMALL.held_out)
    named = (("train", train), ("held_out", held_out))
    return {f"{name}-{at}": problem for name, problems in named for at, problem in enumerate(problems)}


class HalfOracle:
    """A policy that is right in some of its rollouts, and else answers at once."""

    def __init__(self, settings: BaseRolloutSettings, model: Path) -> None:
        self.template, self.turn = load_template(model, settings.template), dict[str, int]()
        self.problems = problems_by_name()

    def __call__(self, ids: object, sampling: Sampling, key: str) -> Answer:
        at = self.turn[key] = self.turn.get(key, -1) + 1
        name = key.split("/")[1]
        right = Random(key).random() < 0.5
        turns = turns_of(self.problems[name]) if right else ["#### 1"]
        return encode_turns(self.template, turns[at])[0]


def make_engine(settings: BaseRolloutSettings, model: Path, *_: object, **__: object) -> Any:
    return ScriptedEngine(HalfOracle(settings, model))


def test_whole_job_in_small_makes_each_part_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setattr(trainer.train.job, "make_engine", make_engine)
    monkeypatch.setitem(JOB, "tools", native_tools())
    model, console = save_tiny_model(tmp_path / "model"), Console(file=io.StringIO(), width=200)
    job = RealJob(tmp_path / "real", model, 0, SMALL, console)
    parts = anyio.run(job.run)
    assert all(part["tried"] == (12 if name.startswith("successes") else 6) for name, part in parts.items())
    assert not any(part["lost"] for part in parts.values())
    successes = parts["successes/sampled"]["succeeded"]
    assert 0 < successes < 12
    learned = list(Rollouts(tmp_path / "real" / "sft"))
    assert 4 <= len(learned) <= successes
    for rollout in learned:  # Without the examples: the system prompt, and one question.
        assert [message["role"] for message in rollout.ledger.entries[0].messages] == ["system", "user"]
    assert all(read_run_cost(tmp_path / "real" / name)["learning"] > 0 for name in ("sft", "grpo"))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "real").rglob("result.json")}
    assert len(before) == len(parts) == 9
    assert anyio.run(job.run) == parts
    assert before == {file: file.stat().st_mtime_ns for file in before}
    smaller = RealJob(tmp_path / "real", model, 0, replace(SMALL, held_out=3), console)
    [measured] = anyio.run(partial(smaller._measure, "before", model, greedy=True)).values()
    assert measured["tried"] == 3, "measured again in another size"
    text = io.StringIO()
    Console(file=text, width=200).print(format_table(parts, SMALL, 0))
    assert f"after SFT on {successes} own successes" in text.getvalue() and "after 2 steps of GRPO" in text.getvalue()
