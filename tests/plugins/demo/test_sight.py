"""The vision demo: its houses, its tools over real transports, and that a model learns to look."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from statistics import mean

import anyio
import pytest
import torch
from PIL import Image as Pictures
from rich.console import Console

from bench.image_controls import run_controls
from gateway.errors import ConfigErrors
from gateway.session import AnyGateway
from gateway.types import Image, Outcome, Task, ToolCall
from mtrl_plugins.demo.demos import DemoTasks, load_demo
from mtrl_plugins.demo.model_cache import find_or_build_model
from mtrl_plugins.demo.problem import Problem, answer_message
from mtrl_plugins.demo.sight.house import (
    COLOURS,
    DARK,
    GREY,
    LIT,
    WINDOWS,
    House,
    draw_inside,
    draw_outside,
    neighbour_of,
)
from mtrl_plugins.demo.sight.sight_demo import build_model
from mtrl_plugins.demo.sight.sight_tasks import KIND, TOOLS, draw_guess, draw_problem
from mtrl_plugins.demo.warm_start import DemonstrationWriter, Recipe
from tests.trainer.cli_data import RunCommand
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.reward.attempt import Attempt
from trainer.reward.functions import exact
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.settings import BaseRolloutSettings
from trainer.setup import make_gateway
from trainer.storage.run_files import METRICS_FILE, read_metrics
from trainer.template import Template
from trainer.train.settings import TrainSettings
from trainer.train.start import train

TOOL_CONFIGS = str(Path(__file__).parents[3] / "tool_configs")
SHORT = Recipe(demo="sight", skill_steps=260, habit_steps=30, kinds=(KIND,))
JOB = {
    "model": "sight",
    "data": "sight",
    "tools": TOOL_CONFIGS,
    "steps": 10,
    "prompts": 8,
    "n": 8,
    "reward": {"components": {"exact": {"function": "exact"}}},
    "template": {"sanity": "ignore_strippable"},
    "limits": {"assistant_turns": 4, "tool_calls": 4, "turn_tokens": 40, "rollout_tokens": 240},
    "algorithm": {"name": "dapo"},
    "update": {"lr": 1e-3, "warmup_steps": 2, "lr_scheduler": "linear", "decay_steps": 10, "min_lr_ratio": 0.1},
    "evaluation": {"every": 10, "rows": 40, "final_rows": 40},
    "checkpoint": {"every": 9},
    "record": True,
}
HOUSE = "Leo Oslo 3"


def picture(png: bytes) -> Pictures.Image:
    return Pictures.open(io.BytesIO(png)).convert("RGB")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template.load(build_model(tmp_path_factory.mktemp("sight") / "model"))


@pytest.fixture
async def gateway() -> AsyncIterator[AnyGateway]:
    async with make_gateway(BaseRolloutSettings(tools=TOOL_CONFIGS)) as opened:
        yield opened


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, short, of a model that guesses."""
    place = tmp_path_factory.mktemp("looked")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = TrainSettings.model_validate(JOB | {"model": str(find_or_build_model(SHORT, place))})
    anyio.run(train, settings, place / "run", Console(file=io.StringIO()))
    torch.set_num_threads(threads)
    return place / "run"


def test_house_is_determined_by_its_name_and_shows_only_its_lit_window() -> None:
    house, seen = House.from_name(HOUSE), picture(draw_outside(HOUSE))
    assert draw_outside(HOUSE) == draw_outside(HOUSE)
    for window, (left, top) in WINDOWS.items():
        assert seen.getpixel((left + 3, top + 3)) == (LIT if window == house.lit else DARK)
        assert picture(draw_inside(HOUSE, window)).getpixel((8, 8)) == COLOURS[house.rooms[window]]


def test_controls_show_a_blank_or_a_swapped_image() -> None:
    assert neighbour_of(neighbour_of(HOUSE)) == HOUSE != neighbour_of(HOUSE)
    assert draw_outside(HOUSE, "neighbour") == draw_outside(neighbour_of(HOUSE))
    assert draw_inside(HOUSE, "upper left", "neighbour") == draw_inside(neighbour_of(HOUSE), "upper left")
    assert {picture(draw_outside(HOUSE, "nothing")).getpixel((x, x)) for x in range(16)} == {GREY}


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


async def test_guessing_succeeds_only_by_chance(template: Template, gateway: AnyGateway) -> None:
    writer, draw, right = DemonstrationWriter(template, TOOLS), Random(0), 0.0
    for place in range(40):
        one = draw_problem("guess", place)
        right += exact(
            Attempt(
                one.task,
                await RolloutRunner(saying(writer, one, [answer_message(draw_guess(draw))]), template, gateway).run(
                    one.task
                ),
            )
        )
    assert right <= 12


async def test_camera_lists_the_windows(gateway: AnyGateway) -> None:
    async with gateway.open(Task(tools=("zoom",))) as session:
        seen, unknown = await session.calls(
            [
                ToolCall("1", "zoom", '{"house": "Leo Oslo 3", "window": "upper left"}'),
                ToolCall("2", "zoom", '{"house": "Leo Oslo 3", "window": "cellar"}'),
            ]
        )
    assert [part.data for part in seen.parts if isinstance(part, Image)] == [draw_inside(HOUSE, "upper left")]
    assert unknown.outcome is Outcome.ERROR and "upper left, upper right" in str(unknown.parts[0])


def test_demo_model_and_tasks_must_match() -> None:
    for wrong in ({"model": "sight"}, {"model": "sight", "data": "sight", "warm": "plain"}):
        with pytest.raises((ConfigErrors, ValueError)):
            TrainSettings.model_validate(wrong)


def test_guessing_model_learns_to_look_and_answer_from_the_image(looked: Path, one_thread: None) -> None:
    before, *steps = read_metrics(looked / METRICS_FILE)
    assert before["eval/greedy"] <= 0.35 and steps[0]["success/sampled"] <= 0.35
    assert steps[-1]["eval/greedy"] >= 0.85
    assert mean(step["success/sampled"] for step in steps[-3:]) >= 0.6
    found = run_controls(looked, 40)
    assert found["blank"] <= 0.35 and found["exchanged"] <= 0.35 and found["follows"] >= 0.85


def test_step_with_images_is_replayed_from_its_tape(looked: Path, run: RunCommand) -> None:
    """With the model that there was, though one of this name would be made otherwise now."""
    about = json.loads((looked / "run.json").read_text())
    about["settings"]["model"] = "sight"
    (looked / "run.json").write_text(json.dumps(about))
    told = run("replay", looked, 10).output
    assert "replayed 64 rollouts of step 10; 0 differ" in told and ", as recorded" in told


def test_check_reports_how_images_are_handled(looked: Path, run: RunCommand) -> None:
    told = run("check", "--tools", TOOL_CONFIGS, "--model", looked / "checkpoints/000010").output
    assert "it reads images: those of tools are in its message" in told
    assert "it never samples <|image_pad|>, <|video_pad|>, <|vision_start|>, <|vision_end|>" in told
