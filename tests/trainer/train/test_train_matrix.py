"""Every algorithm and setting: two steps, resumed bit-identically and replayed."""

from __future__ import annotations

import shutil
from math import fsum
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.train.jobs import SMALL, small_job
from tests.trainer.train.trainings import read_metrics_without_times, string_console
from trainer.storage.rollout_file import Rollouts
from trainer.train.replay_step import replay_step
from trainer.train.settings import TrainSettings
from trainer.train.start import train

USER_CODE = '''
import anyio


def calculate(expression: str) -> str:
    """Adds up, as long as the line is not dead."""
    total = sum(int(part) for part in expression.split("+"))
    if total % 3 == 0:
        raise ConnectionResetError("the line is dead")
    return str(total)


async def slowly(attempt):
    await anyio.sleep(0)
    return float(attempt.answer == f"#### {attempt.truth}")


def ranks(attempts):
    """A reward that depends on the group: shorter than its siblings is better."""
    sizes = sorted(sum(len(turn.ids) for turn in one.turns) for one in attempts)
    return [1 - sizes.index(sum(len(turn.ids) for turn in one.turns)) / len(sizes) for one in attempts]


def longer(attempt):
    if sum(len(turn.ids) for turn in attempt.turns) % 7 == 0:
        raise RuntimeError("cannot say")
    return sum(len(turn.ids) for turn in attempt.turns) / 100


def halves(ledger):
    """Of every turn the first token counts half."""
    before = (False, *ledger.mask)
    return [0.5 if mine and not mine_before else float(mine) for mine, mine_before in zip(ledger.mask, before)]
'''
TOOLS = """
tools:
  - class_name: mtrl_plugins.demo.facts.lookup.LookUp
  - function: own:calculate
interaction:
  - class_name: gateway.feedback.attempts.AttemptsInteraction
    name: judge
    config:
      interaction: {class_name: gateway.feedback.gsm8k.Gsm8kInteraction}
      max_attempts: 2
      weights: [1.0, 0.5]
      used_up: ""
      remaining: ""
"""
JOB: dict[str, Any] = {
    "steps": 2,
    "prompts": 3,
    "n": 4,
    "reward": {
        "components": {
            "outcome": {"function": "outcome"},
            "brief": {"function": "own.py:ranks", "batched": True, "weight": 0.1},
        }
    },
    "evaluation": {"every": 0},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.05, "estimator": "k3+"}},
        "update": {"minibatches": 2, "micro_batch_tokens": 300},
    },
    "dr_grpo": {
        "algorithm": {
            "name": "dr_grpo",
            "aggregate": 40,
            "credit": {"kind": "discounted", "gamma": 0.9, "trained_turns": "last"},
        },
        "reward": {"components": {"right": {"function": "own.py:slowly"}, "long": {"function": "own.py:longer"}}},
    },
    "dapo": {
        "algorithm": {"name": "dapo", "dynamic_sampling": True, "overlong": {"limit": 60, "buffer": 50}},
        "reward": {"components": {"outcome": {"function": "outcome"}}},
        "update": {"minibatches": 2, "epochs": 2},
    },
    "rloo": {
        "demo": {"kinds": ["judged", "fact"]},
        "algorithm": {
            "name": "rloo",
            "credit": {"kind": "scores"},
            "kl": {"coefficient": 0.05, "estimator": "k1", "in_reward": True},
        },
        "update": {"minibatches": 2},
    },
    "reinforce_pp": {
        "algorithm": {"name": "reinforce_pp", "credit": {"kind": "gae", "lam": 0.9}},
        "update": {"critic": {"lr": 1e-3}, "epochs": 2},
    },
    "gspo": {
        "algorithm": {"name": "gspo", "mismatch": {"truncate": "sequence"}, "kl": {"coefficient": 0.05}},
        "update": {"lora": {"rank": 4}, "epochs": 2},
    },
    "cispo": {
        "demo": {"kinds": ["judged", "fact"]},
        "algorithm": {
            "name": "cispo",
            "mismatch": {"reject": "token"},
            "credit": {"kind": "turns", "trained_turns": "own.py:halves"},
        },
        "update": {"gradient_checkpointing": True},
    },
    "stages": {"curriculum": {"stages": [{"tools": ["look_up"], "until": {"step": 1}}, {"interaction": "judge"}]}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tools that start no process, and functions of one's own."""
    place = tmp_path_factory.mktemp("ways")
    (place / "tools").mkdir()
    (place / "tools/tools.yaml").write_text(TOOLS)
    (place / "own.py").write_text(USER_CODE)
    return place


def make_job(place: Path, way: str) -> TrainSettings:
    given = {**JOB, "tools": str(place / "tools"), "algorithm": {"name": "grpo"}, **VARIANTS[way]}
    return small_job(**{**given, "update": SMALL["update"] | VARIANTS[way].get("update", {})})


def rollout_contents(run: Path) -> list[object]:
    """What was written, and how likely it was; how much of it the engine knew already is the machine's."""
    return [(one.name, one.stop, one.ledger.ids, one.ledger.logprobs, one.rewards) for one in Rollouts(run)]


@pytest.mark.parametrize("way", VARIANTS)
async def test_a_step_resumes_bit_identically_and_is_replayed(
    way: str, place: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.chdir(place)
    console, run, settings = string_console(), place / way, make_job(place, way)
    await train(settings, run, console)
    whole, written = read_metrics_without_times(run), rollout_contents(run)
    assert len(whole) == 2 and any(line.get("update/grad_norm") for line in whole), whole
    for line in whole:
        scored = [one.rewards for one in Rollouts(run) if one.rewards and one.group.startswith(f"{line['step']}-")]
        for name in scored[0]:
            assert line[f"reward/{name}"] == fsum(one[name] for one in scored) / len(scored)
    shutil.rmtree(run / "checkpoints/000002")
    await train(settings, run, console, resume=True)
    assert read_metrics_without_times(run) == whole
    assert rollout_contents(run) == written
    for step in (1, 2):
        assert await replay_step(run, step, console), console.file.getvalue()  # type: ignore[attr-defined]
    losses = [line["loss"] for line in whole if "loss" in line]
    assert all(f"the loss is {loss!r}, as recorded" in console.file.getvalue() for loss in losses)  # type: ignore[attr-defined]
