"""The demo's tasks are the same for the same seed, and a perfect policy is right in every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from gateway.session import AnyGateway
from trainer.config import PlaySettings
from trainer.data.sampler import Sampler
from trainer.demo.data import Drawn
from trainer.demo.demonstrate import Writer
from trainer.demo.facts.demo import DEMO
from trainer.demo.facts.model import tokenizer
from trainer.demo.facts.task import KINDS, TOOLS, TRAILS, number, problem, problems
from trainer.demo.problem import Problem, says
from trainer.demo.warm import PLAIN, Recipe
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author, Message
from trainer.play import Player
from trainer.reward.attempt import Attempt
from trainer.reward.shipped import outcome
from trainer.run.rollout import StopReason
from trainer.stage import gateway_of
from trainer.template import Template

FOLDER = Path(__file__).parents[3] / "tool_configs"
PER_KIND = 40


@pytest.fixture(scope="module")
def template() -> Template:
    return Template.load(tokenizer())


@pytest.fixture
async def gateway() -> AsyncIterator[AnyGateway]:
    async with gateway_of(PlaySettings(tools=str(FOLDER))) as opened:
        yield opened


def saying(writer: Writer, by_task: dict[str, Sequence[Message]]) -> ScriptedEngine:
    """A policy that says these turns in each task, one after the other."""
    said: Counter[str] = Counter()

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        said[key] += 1
        return writer.says(by_task[key.split("/")[1]][said[key] - 1])

    return ScriptedEngine(script)


def some(split: str = "train", count: int = PER_KIND * len(KINDS)) -> list[Problem]:
    return list(islice(problems(3, split), count))  # type: ignore[arg-type]


def test_the_same_seed_draws_the_same_tasks_and_another_seed_others() -> None:
    first = [one.task.columns for one in some()]
    assert first == [one.task.columns for one in some()]
    assert first != [one.task.columns for one in islice(problems(4), len(first))]


def test_data_are_the_tasks_as_they_are_drawn_wherever_one_begins() -> None:
    drawn = Drawn(DEMO, 3, PER_KIND)
    assert [one.columns["kind"] for one in drawn[:5]] == list(KINDS)
    assert list(drawn) == drawn[:] == [one.task for one in some(count=PER_KIND)]
    assert drawn[-1] == drawn[PER_KIND - 1] == list(drawn)[-1]
    assert drawn[7:3:-2] == [drawn[7], drawn[5]]
    assert {one.columns["kind"] for one in Drawn(DEMO, 3, 6, "held_out", ("sum", "hop"))} == {"sum", "hop"}
    with pytest.raises(IndexError):
        drawn[PER_KIND]


def test_a_sampler_takes_each_of_the_data_once_in_an_epoch() -> None:
    drawn = Drawn(DEMO, 3, 20)
    ids = [one.id for one in islice(Sampler(drawn, seed=1), 20)]
    assert ids != [one.id for one in drawn]
    assert sorted(ids) == sorted(one.id for one in drawn)


def test_each_kind_needs_as_many_calls_as_it_says() -> None:
    needed = {kind: {len(problem(0, place, kind).calls) for place in range(20)} for kind in KINDS}
    assert needed == {"fact": {1}, "sum": {1}, "hop": {2}, "move": {3}, "judged": {1}}


def test_a_trail_is_as_long_as_it_says_and_its_question_does_not_tell() -> None:
    drawn = {kind: [problem(0, place, kind) for place in range(20)] for kind in TRAILS}
    needed = {kind: {len(one.calls) for one in found} for kind, found in drawn.items()}
    lengths = {"renamed": {2}, "renamed_twice": {3}, "renamed_thrice": {4}, "guest": {3}, "guest_twice": {4}}
    assert needed == lengths
    for one in (one for found in drawn.values() for one in found):
        frame = "How many people live in the city of {}?" if "guest" in one.kind else "How many people live in {}?"
        assert one.task.messages[0]["content"] == frame.format(one.calls[0].arguments["name"])
        assert [call.answer for call in one.calls] == [*(call.arguments["name"] for call in one.calls[1:]), one.answer]


def test_neither_the_default_job_nor_a_demonstration_has_a_trail() -> None:
    assert not {*TRAILS} & {*KINDS, *Recipe().kinds, *PLAIN.kinds}
    assert {one.kind for one in some(count=20)} == {*KINDS}
    assert PLAIN.habit == 0
    assert {len(problem(0, place, kind).calls) for kind in PLAIN.kinds for place in range(5)} == {1, 2}


def test_no_held_out_facts_are_ever_trained_on() -> None:
    trained = {str((one.task.messages, one.task.columns["facts"])) for one in some()}
    held = {str((one.task.messages, one.task.columns["facts"])) for one in some("held_out")}
    assert len(trained) == len(held) == PER_KIND * len(KINDS)
    assert not trained & held


def test_answers_of_each_length_are_as_many() -> None:
    lengths = Counter(len(one.answer) for one in some(count=1500))
    assert set(lengths) == {3, 4, 5}
    assert all(400 <= count <= 600 for count in lengths.values())


async def test_a_perfect_policy_is_right_in_every_task_of_every_kind(template: Template, gateway: AnyGateway) -> None:
    drawn = [*some("held_out"), *islice(problems(3, "held_out", tuple(TRAILS)), PER_KIND * len(TRAILS))]
    engine = saying(Writer(template, TOOLS), {one.task.id: one.turns for one in drawn})
    player = Player(engine, template, gateway)
    failures = Counter[str]()
    for one in drawn:
        rollout = await player.play(one.task)
        failures[one.kind] += outcome(Attempt(one.task, rollout)) != 1.0
        assert len(rollout.ledger.turns) == len(one.calls) + 1
        assert "drift" not in rollout.infos
    assert failures == dict.fromkeys([*KINDS, *TRAILS], 0)


async def test_what_is_demonstrated_is_what_a_rollout_would_have_been(template: Template, gateway: AnyGateway) -> None:
    writer = Writer(template, TOOLS)
    for kind in ("fact", "sum", "hop", "move"):
        one = problem(5, 0, kind)
        engine = saying(writer, {one.task.id: one.turns})
        rollout = await Player(engine, template, gateway).play(one.task)
        shown = writer.demonstration(one, Random(0))
        assert shown.ids == rollout.ledger.ids
        assert shown.mask == rollout.ledger.mask


async def test_a_wrong_result_is_told_and_a_second_try_is_worth_half(template: Template, gateway: AnyGateway) -> None:
    one = problem(5, 0, "judged")
    turns = {"late": (says("1"), *one.turns), "never": (says("1"), says("2"), *one.turns)}
    found = {}
    for name, said in turns.items():
        engine = saying(Writer(template, TOOLS), {one.task.id: said})
        rollout = await Player(engine, template, gateway).play(one.task)
        assert rollout.stop is StopReason.FEEDBACK_DONE
        assert sum(entry.author is Author.FEEDBACK for entry in rollout.ledger) == 2
        found[name] = outcome(Attempt(one.task, rollout))
    assert found == {"late": 0.5, "never": 0.0}


async def test_a_guess_earns_nothing(template: Template, gateway: AnyGateway) -> None:
    drawn = [problem(6, 0, kind) for kind in KINDS]
    guesses = {one.task.id: [says(number(Random(place)))] * 2 for place, one in enumerate(drawn)}
    player = Player(saying(Writer(template, TOOLS), guesses), template, gateway)  # type: ignore[arg-type]
    assert [outcome(Attempt(one.task, await player.play(one.task))) for one in drawn] == [0.0] * len(drawn)


async def test_the_tools_of_a_rollout_read_as_those_of_the_demonstrations(
    template: Template, gateway: AnyGateway
) -> None:
    one = problem(7, 0, "hop")
    async with gateway.open(one.task.asked) as session:
        assert template.open(one.task.messages, session.specs) == template.open(one.task.messages, TOOLS)
