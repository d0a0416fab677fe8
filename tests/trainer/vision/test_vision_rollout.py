"""From a tool's picture to the gradient: what the engine saw is what is learned from."""

from __future__ import annotations

from pathlib import Path

import torch

from gateway.content import content
from gateway.types import Text
from tests.trainer.scripts import calling, says
from tests.trainer.vision.played import LOOKS, lesson_of, play
from tests.trainer.vision.seeing import engine_of, picture
from trainer.engine.base import Sampling, Written
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.learn.settings import AlgorithmSettings
from trainer.ledger import Author
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.run.rollout import StopReason
from trainer.steps import ToolsAndFeedback
from trainer.task import Task
from trainer.template import Template
from trainer.train.rolling import Rolled

PICTURES = [picture(1), picture(2, 24, 8)]
GRPO = AlgorithmSettings()


async def test_a_policy_reads_pictures_of_tools_and_a_step_is_made_on_them(kind: Path) -> None:
    rollouts = await play(kind, PICTURES, n=4)
    for rollout in rollouts:
        assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
        assert [place.medium for place in rollout.ledger.places] == PICTURES
        tools = [entry for entry in rollout.ledger if entry.author is Author.TOOL]
        assert [entry.widths for entry in tools] == [(4,), (3,)]
    policy = Policy.load(kind, UpdateSettings(lr=1e-2))
    before = {name: value.clone() for name, value in policy.weights.items()}
    told = Learner(policy, GRPO, exact=True).learn(lesson_of(rollouts, GRPO))
    moved = {name for name, value in policy.weights.items() if not torch.equal(value, before[name])}
    assert told["mismatch/max"] < 1e-5
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)


async def test_what_the_ledger_has_at_a_pictures_place_is_what_the_engine_read(sees: Path) -> None:
    template = Template.load(sees)
    assert template.eyes is not None
    [rollout] = await play(sees, PICTURES, template=template)
    ledger, image = rollout.ledger, template.eyes.family.image
    begin, end = (template.tokens.control[f"<|vision_{side}|>"] for side in ("start", "end"))
    assert [ledger.ids[place.start - 1 : place.stop + 1] for place in ledger.places] == [(begin, image, end)] * 2
    assert [place.stop - place.start for place in ledger.expanded.places] == [4, 3]
    assert not any(image in turn.ids for turn in ledger.turns)


async def test_calls_that_are_answered_with_pictures_are_as_the_template_would_write_them(sees: Path) -> None:
    template = Template.load(sees)
    turns = [calling(("look", {"number": 0})), calling(("look", {"number": 1}), ("look", {"number": 0})), "Two cats."]
    said = iter(says(template, *turns))
    engine = ScriptedEngine(lambda ids, sampling, key: next(said))
    [rollout] = await play(sees, PICTURES, template=template, engine=engine, stepper=ToolsAndFeedback())
    assert (rollout.stop, rollout.infos) == (StopReason.DONE, {})  # where it differs, that would be told there
    assert rollout.ledger.images == (PICTURES[0], PICTURES[1], PICTURES[0])


async def test_siblings_and_turns_share_what_was_made_ready(sees: Path) -> None:
    template = Template.load(sees)
    assert template.eyes is not None
    engine = engine_of(sees, template.eyes)
    rollouts = await play(sees, PICTURES, n=4, looks=4, template=template, engine=engine)
    assert [len(rollout.ledger.images) for rollout in rollouts] == [4] * 4
    assert template.eyes.processed == 2


async def test_siblings_share_the_pictures_of_their_opening(sees: Path) -> None:
    """In the engine's cache, as words are."""
    shown = Task("t", ({"role": "user", "content": content((Text("Look:"), PICTURES[0], Text("What is it?")))},))
    rollouts = await play(sees, PICTURES, n=2, looks=0, task=shown)
    assert [rollout.ledger.images for rollout in rollouts] == [(PICTURES[0],)] * 2
    opening = len(rollouts[0].ledger.entries[0].expanded.ids)
    assert sorted(rollout.ledger.turns[0].cached for rollout in rollouts) == [0, opening - 1]
    assert LOOKS.messages[0]["content"] and rollouts[0].ledger.messages[0]["content"][1] == {"type": "image"}


def counting(read: int | None) -> ScriptedEngine:
    """A turn each, and how many ids each was asked to go on from."""

    def script(ids: tuple[int, ...], sampling: Sampling, key: str) -> Answer:
        return Written((0,), (-1.0,), "stop", read=read)

    return ScriptedEngine(script)  # type: ignore[arg-type]


async def test_an_engine_that_counts_otherwise_ends_the_rollout_by_name_and_is_counted(sees: Path) -> None:
    engine = counting(None)
    [rollout] = await play(sees, PICTURES, engine=engine)
    assert rollout.stop is StopReason.DONE
    assert set(Template.load(sees).barred) <= set(engine.asked[-1].sampling.barred)
    assert engine.asked[-1].ids == rollout.ledger.ids[: -len(rollout.ledger.turns[-1].ids)]
    assert engine.asked[-1].images == tuple(PICTURES)
    asked = len(rollout.ledger.expanded.ids) - 1
    [rollout] = await play(sees, PICTURES, looks=0, engine=counting(7))
    assert rollout.stop is StopReason.MISALIGNED and rollout.stop.infrastructure and not rollout.ledger.turns
    assert "the engine read 7 ids, where the ledger has" in rollout.reason and asked > 7
    told = Rolled(over=[rollout]).metrics(0)
    assert told["lost/misaligned"] == told["rollout/lost"] == 1 and told["rollout/count"] == 0


async def test_a_picture_that_does_not_fit_ends_the_rollout_before_it_is_read(sees: Path) -> None:
    [rollout] = await play(sees, [picture(1, 64, 64)], looks=9, room=600)
    assert rollout.stop is StopReason.LENGTH_ROLLOUT and "does not fit" in rollout.reason
    assert len(rollout.ledger.expanded) < 600 < len(rollout.ledger.expanded) + 100
    assert rollout.ledger.entries[-1].parts[1] == picture(1, 64, 64) and not rollout.ledger.entries[-1].spans


async def test_fifty_pictures_at_once_stand_in_their_order(sees: Path) -> None:
    shown = Task("t", ({"role": "user", "content": content([picture(number) for number in range(50)])},))
    [rollout] = await play(sees, PICTURES, looks=0, task=shown)
    assert rollout.stop is StopReason.DONE
    assert rollout.ledger.images == tuple(picture(number) for number in range(50))
