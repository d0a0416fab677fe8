"""The demo for a model that sees: its houses, its tools over their real transports, and that it learns to look."""

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

from bench.bars import controls
from gateway.errors import ConfigErrors
from gateway.session import AnyGateway
from gateway.types import Image, Outcome, Task, ToolCall
from tests.trainer.typed import Run
from trainer.config import PlaySettings
from trainer.demo.data import Drawn
from trainer.demo.demonstrate import Writer
from trainer.demo.demos import demo
from trainer.demo.folder import made
from trainer.demo.problem import Problem, says
from trainer.demo.sight.house import COLOURS, DARK, GREY, LIT, WINDOWS, House, inside, neighbour, outside
from trainer.demo.sight.model import build
from trainer.demo.sight.task import KIND, TOOLS, guess, problem
from trainer.demo.warm import Recipe
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.play import Player
from trainer.reward.attempt import Attempt
from trainer.reward.shipped import exact
from trainer.run.history import NAME, history
from trainer.stage import gateway_of
from trainer.template import Template
from trainer.train.settings import TrainSettings
from trainer.train.start import train

TOOL_CONFIGS = str(Path(__file__).parents[3] / "tool_configs")
SHORT = Recipe(demo="sight", clean=260, habit=30, kinds=(KIND,))
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
    "update": {"lr": 1e-3, "warmup": 2, "steps": 10, "floor": 0.1},
    "evaluation": {"every": 10, "few": 40, "rows": 40},
    "checkpoint": {"every": 9},
    "record": True,
}
HOUSE = "Leo Oslo 3"


def picture(png: bytes) -> Pictures.Image:
    return Pictures.open(io.BytesIO(png)).convert("RGB")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template.load(build(tmp_path_factory.mktemp("sight") / "model"))


@pytest.fixture
async def gateway() -> AsyncIterator[AnyGateway]:
    async with gateway_of(PlaySettings(tools=TOOL_CONFIGS)) as opened:
        yield opened


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, short, of a model that guesses."""
    place = tmp_path_factory.mktemp("looked")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = TrainSettings.model_validate(JOB | {"model": str(made(SHORT, place))})
    anyio.run(train, settings, place / "run", Console(file=io.StringIO()))
    torch.set_num_threads(threads)
    return place / "run"


def test_a_house_is_all_in_its_name_and_only_its_lit_window_shows_from_outside() -> None:
    house, seen = House.named(HOUSE), picture(outside(HOUSE))
    assert outside(HOUSE) == outside(HOUSE)
    for window, (left, top) in WINDOWS.items():
        assert seen.getpixel((left + 3, top + 3)) == (LIT if window == house.lit else DARK)
        assert picture(inside(HOUSE, window)).getpixel((8, 8)) == COLOURS[house.rooms[window]]


def test_the_controls_show_nothing_or_the_house_that_each_changes_places_with() -> None:
    assert neighbour(neighbour(HOUSE)) == HOUSE != neighbour(HOUSE)
    assert outside(HOUSE, "neighbour") == outside(neighbour(HOUSE))
    assert inside(HOUSE, "upper left", "neighbour") == inside(neighbour(HOUSE), "upper left")
    assert {picture(outside(HOUSE, "nothing")).getpixel((x, x)) for x in range(16)} == {GREY}


def test_no_house_is_trained_on_and_held_out_and_every_colour_is_as_likely() -> None:
    sight = demo("sight")
    train = {str(task.columns["house"]) for task in Drawn(sight, 0, 1500)}
    held = {str(task.columns["house"]) for task in Drawn(sight, 0, 300, "held_out")}
    assert len(held) > 100 and not train & held
    shares = [sum(House.named(name).answer == colour for name in train) / len(train) for colour in COLOURS]
    assert max(shares) < 0.2 and min(shares) > 0.06


def saying(writer: Writer, one: Problem, turns: Sequence[object]) -> ScriptedEngine:
    left = list(turns)

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        return writer.says(left.pop(0))  # type: ignore[arg-type]

    return ScriptedEngine(script)


async def test_a_perfect_policy_is_right_over_the_real_tools_and_writes_what_is_demonstrated(
    template: Template, gateway: AnyGateway
) -> None:
    writer = Writer(template, TOOLS)
    for place in range(6):
        one = problem("held", place, KIND, "held_out")
        rollout = await Player(saying(writer, one, one.turns), template, gateway).play(one.task)
        shown = writer.demonstration(one, Random(0))
        assert exact(Attempt(one.task, rollout)) == 1.0
        assert rollout.ledger.ids == shown.ids and rollout.ledger.mask == shown.mask
        assert rollout.ledger.expanded.ids == shown.expanded.ids
        assert [image.data for image in Attempt(one.task, rollout).images] == [image.data for image in shown.images]
        assert len(shown.expanded) == len(shown) + 2 * 3  # Four ids for each of two pictures, in place of one.


async def test_a_guess_earns_nothing_but_by_chance(template: Template, gateway: AnyGateway) -> None:
    writer, draw, right = Writer(template, TOOLS), Random(0), 0.0
    for place in range(40):
        one = problem("guess", place)
        right += exact(
            Attempt(one.task, await Player(saying(writer, one, [says(guess(draw))]), template, gateway).play(one.task))
        )
    assert right <= 12


async def test_the_camera_says_which_windows_there_are(gateway: AnyGateway) -> None:
    async with gateway.open(Task(tools=("zoom",))) as session:
        seen, unknown = await session.calls(
            [
                ToolCall("1", "zoom", '{"house": "Leo Oslo 3", "window": "upper left"}'),
                ToolCall("2", "zoom", '{"house": "Leo Oslo 3", "window": "cellar"}'),
            ]
        )
    assert [part.data for part in seen.parts if isinstance(part, Image)] == [inside(HOUSE, "upper left")]
    assert unknown.outcome is Outcome.ERROR and "upper left, upper right" in str(unknown.parts[0])


def test_a_demos_model_and_tasks_belong_together() -> None:
    for wrong in ({"model": "sight"}, {"model": "sight", "data": "sight", "warm": "plain"}):
        with pytest.raises((ConfigErrors, ValueError)):
            TrainSettings.model_validate(wrong)


def test_a_model_that_guesses_learns_to_look_and_answers_from_what_it_sees(looked: Path, one_thread: None) -> None:
    before, *steps = history(looked / NAME)
    assert before["eval/greedy"] <= 0.35 and steps[0]["success/sampled"] <= 0.35
    assert steps[-1]["eval/greedy"] >= 0.85
    assert mean(step["success/sampled"] for step in steps[-3:]) >= 0.6
    found = controls(looked, 40)
    assert found["blank"] <= 0.35 and found["exchanged"] <= 0.35 and found["follows"] >= 0.85


def test_a_step_with_pictures_is_made_again_from_its_tape(looked: Path, run: Run) -> None:
    """With the model that there was, though one of this name would be made otherwise now."""
    about = json.loads((looked / "run.json").read_text())
    about["settings"]["model"] = "sight"
    (looked / "run.json").write_text(json.dumps(about))
    told = run("replay", looked, 10).output
    assert "64 rollouts of step 10 played again, 0 of them differ" in told and ", as it was" in told


def test_before_a_run_it_is_told_what_becomes_of_pictures(looked: Path, run: Run) -> None:
    told = run("check", "--tools", TOOL_CONFIGS, "--model", looked / "checkpoints/000010").output
    assert "it sees: what a tool shows stands in its message (template.images)" in told
    assert "it never writes <|image_pad|>, <|video_pad|>, <|vision_start|>, <|vision_end|>" in told
