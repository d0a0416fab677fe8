"""The vision demo: its houses, its tools over real transports, and a run with its images."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

import anyio
import pytest
import torch
from rich.console import Console

from bench.image_controls import run_controls
from gateway.session import AnyGateway
from mtrl_plugins.demo.demos import DemoTasks, load_demo
from mtrl_plugins.demo.model_cache import find_or_build_model
from mtrl_plugins.demo.problem import Problem
from mtrl_plugins.demo.sight.house import COLOURS, House
from mtrl_plugins.demo.sight.sight_demo import build_model
from mtrl_plugins.demo.sight.sight_tasks import KIND, TOOLS, draw_problem
from mtrl_plugins.demo.warm_start import DemonstrationWriter, Recipe
from tests.trainer.cli_data import RunCommand
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.reward.attempt import Attempt
from trainer.reward.functions import exact
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.settings import BaseRolloutSettings
from trainer.setup import make_gateway
from trainer.storage.rollout_file import Rollouts
from trainer.template import Template
from trainer.train.settings import TrainSettings
from trainer.train.start import train

SEVENTHS = Path(__file__).parents[2] / "trainer" / "train" / "sevenths.py"
TOOL_CONFIGS = str(Path(__file__).parents[3] / "tool_configs")
SHORT = Recipe(demo="sight", skill_steps=100, habit_steps=0, kinds=(KIND,))
JOB = {
    "model": "sight",
    "data": "sight",
    "tools": TOOL_CONFIGS,
    "steps": 1,
    "prompts": 2,
    "n": 4,
    "reward": {"components": {"sevenths": {"function": f"{SEVENTHS}:sevenths"}}},
    "template": {"sanity": "ignore_strippable"},
    "limits": {"assistant_turns": 4, "tool_calls": 4, "turn_tokens": 40, "rollout_tokens": 240},
    "evaluation": {"every": 0, "after": False},
    "record": True,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template.load(build_model(tmp_path_factory.mktemp("sight") / "model"))


@pytest.fixture
async def gateway() -> AsyncIterator[AnyGateway]:
    async with make_gateway(BaseRolloutSettings(tools=TOOL_CONFIGS)) as opened:
        yield opened


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    place = tmp_path_factory.mktemp("looked")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = TrainSettings.model_validate(JOB | {"model": str(find_or_build_model(SHORT, place))})
    anyio.run(train, settings, place / "run", Console(file=io.StringIO()))
    torch.set_num_threads(threads)
    return place / "run"


def test_training_and_held_out_houses_are_disjoint_with_balanced_colours() -> None:
    sight = load_demo("sight")
    train = {str(task.columns["house"]) for task in DemoTasks(sight, 0, 1500)}
    held = {str(task.columns["house"]) for task in DemoTasks(sight, 0, 300, "held_out")}
    assert len(held) > 100 and not train & held
    shares = [sum(House.from_name(name).answer == colour for name in train) / len(train) for colour in COLOURS]
    assert max(shares) < 0.2 and min(shares) > 0.06


def saying(writer: DemonstrationWriter, one: Problem, turns: Sequence[object]) -> ScriptedEngine:
    left = list(turns)

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        return writer.encode_turn(left.pop(0))  # type: ignore[arg-type]

    return ScriptedEngine(script)


async def test_perfect_policy_solves_every_task_with_the_demonstrated_text(
    template: Template, gateway: AnyGateway
) -> None:
    writer = DemonstrationWriter(template, TOOLS)
    for place in range(6):
        one = draw_problem("held", place, KIND, "held_out")
        rollout = await RolloutRunner(saying(writer, one, one.turns), template, gateway).run(one.task)
        shown = writer.write(one, Random(0))
        assert exact(Attempt(one.task, rollout)) == 1.0
        assert rollout.ledger.ids == shown.ids and rollout.ledger.mask == shown.mask
        assert rollout.ledger.expanded.ids == shown.expanded.ids
        assert [image.data for image in Attempt(one.task, rollout).images] == [image.data for image in shown.images]
        assert len(shown.expanded) == len(shown) + 2 * 3  # Four ids for each of two pictures, in place of one.


def test_demo_model_and_tasks_must_match() -> None:
    with pytest.raises(ValueError, match="knows only the words of its own tasks"):
        TrainSettings.model_validate({"model": "sight"})
    for own in ({"model": "sight", "data": "sight"}, {"model": "shell", "environment": "harbor:shell"}):
        with pytest.raises(ValueError, match="more than one warm start"):
            TrainSettings.model_validate({**own, "demo": {"warm": "plain"}})


def test_controls_show_blank_and_exchanged_images(looked: Path, one_thread: None) -> None:
    assert {name: 0 <= rate <= 1 for name, rate in run_controls(looked, 2).items()} == dict.fromkeys(
        ("blank", "exchanged", "follows"), True
    )


def test_step_with_images_is_replayed_from_its_tape(looked: Path, run: RunCommand) -> None:
    """With the model that there was, though one of this name would be made otherwise now."""
    about = json.loads((looked / "run.json").read_text())
    about["settings"]["model"] = "sight"
    (looked / "run.json").write_text(json.dumps(about))
    assert any(rollout.ledger.images for rollout in Rollouts(looked))
    told = run("replay", looked, 1).output
    assert "replayed 8 rollouts of step 1; 0 differ" in told and ", as recorded" in told


def test_dry_run_reports_how_images_are_handled(looked: Path, run: RunCommand) -> None:
    model = looked / "checkpoints/000001"
    told = run("--config", "sight", "--tools", TOOL_CONFIGS, "--model", model, "--dry-run", "-v").output
    assert "it reads images: those of tools are in its message" in told
    assert "it never samples <|image_pad|>, <|video_pad|>, <|vision_start|>, <|vision_end|>" in told
