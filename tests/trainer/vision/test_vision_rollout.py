"""Rollouts with tool images, up to the gradient."""

from __future__ import annotations

from pathlib import Path

import torch

from gateway.chat_messages import chat_content
from gateway.types import Text
from tests.trainer.policy_scripts import encode_turns, render_calls
from tests.trainer.vision.vision_models import engine_of, picture
from tests.trainer.vision.vision_rollouts import LOOKS, lesson_of, play
from trainer.algorithms.settings import AlgorithmSettings
from trainer.engine.base import Generation, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import ToolsAndFeedback
from trainer.rollout.task import Task
from trainer.template import Template
from trainer.train.collect import StepRollouts

PICTURES = [picture(1), picture(2, 24, 8)]
GRPO = AlgorithmSettings()


async def test_policy_reads_tool_images_and_trains_on_them(kind: Path) -> None:
    rollouts = await play(kind, PICTURES, n=4)
    for rollout in rollouts:
        assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
        assert [place.medium for place in rollout.ledger.media_spans] == PICTURES
        tools = [entry for entry in rollout.ledger if entry.author is Author.TOOL]
        assert [entry.widths for entry in tools] == [(4,), (3,)]
    policy = Policy.load(kind, UpdateSettings(lr=1e-2))
    before = {name: value.clone() for name, value in policy.weights.items()}
    metrics = PolicyUpdater(policy, GRPO, exact=True).train_step(lesson_of(rollouts, GRPO))
    moved = {name for name, value in policy.weights.items() if not torch.equal(value, before[name])}
    assert metrics["mismatch/max"] < 1e-5
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)


async def test_ledger_has_the_image_ids_that_the_engine_read(sees: Path) -> None:
    template = Template.load(sees)
    assert template.image_processor is not None
    [rollout] = await play(sees, PICTURES, template=template)
    ledger, image = rollout.ledger, template.image_processor.family.image_id
    begin, end = (template.tokenizer.control_ids[f"<|vision_{side}|>"] for side in ("start", "end"))
    assert [ledger.ids[place.start - 1 : place.stop + 1] for place in ledger.media_spans] == [(begin, image, end)] * 2
    assert [place.stop - place.start for place in ledger.expanded.media_spans] == [4, 3]
    assert not any(image in turn.ids for turn in ledger.turns)


async def test_tool_images_are_rendered_as_the_template_renders_them(sees: Path) -> None:
    template = Template.load(sees)
    turns = [
        render_calls(("look", {"number": 0})),
        render_calls(("look", {"number": 1}), ("look", {"number": 0})),
        "Two cats.",
    ]
    scripted = iter(encode_turns(template, *turns))
    engine = ScriptedEngine(lambda ids, sampling, key: next(scripted))
    [rollout] = await play(sees, PICTURES, template=template, engine=engine, stepper=ToolsAndFeedback())
    assert (rollout.stop, rollout.infos) == (StopReason.DONE, {})  # A mismatch would be in the infos.
    assert rollout.ledger.images == (PICTURES[0], PICTURES[1], PICTURES[0])


async def test_siblings_and_turns_share_prepared_images(sees: Path) -> None:
    template = Template.load(sees)
    assert template.image_processor is not None
    engine = engine_of(sees, template.image_processor)
    rollouts = await play(sees, PICTURES, n=4, looks=4, template=template, engine=engine)
    assert [len(rollout.ledger.images) for rollout in rollouts] == [4] * 4
    assert template.image_processor.processed_count == 2


async def test_siblings_share_the_images_of_their_prompt(sees: Path) -> None:
    """In the engine's cache, as words are."""
    shown = Task("t", ({"role": "user", "content": chat_content((Text("Look:"), PICTURES[0], Text("What is it?")))},))
    rollouts = await play(sees, PICTURES, n=2, looks=0, task=shown)
    assert [rollout.ledger.images for rollout in rollouts] == [(PICTURES[0],)] * 2
    opening = len(rollouts[0].ledger.entries[0].expanded.ids)
    assert sorted(rollout.ledger.turns[0].cached_tokens for rollout in rollouts) == [0, opening - 1]
    assert LOOKS.messages[0]["content"] and rollouts[0].ledger.messages[0]["content"][1] == {"type": "image"}


def counting(read: int | None) -> ScriptedEngine:
    """A turn each, and how many ids each was asked to go on from."""

    def script(ids: tuple[int, ...], sampling: Sampling, key: str) -> Answer:
        return Generation((0,), (-1.0,), "stop", prompt_tokens=read)

    return ScriptedEngine(script)  # type: ignore[arg-type]


async def test_engine_with_another_image_width_ends_the_rollout_as_an_infrastructure_failure(sees: Path) -> None:
    engine = counting(None)
    [rollout] = await play(sees, PICTURES, engine=engine)
    assert rollout.stop is StopReason.DONE
    assert set(Template.load(sees).banned_ids) <= set(engine.requests[-1].sampling.banned_ids)
    assert engine.requests[-1].ids == rollout.ledger.ids[: -len(rollout.ledger.turns[-1].ids)]
    assert engine.requests[-1].images == tuple(PICTURES)
    asked = len(rollout.ledger.expanded.ids) - 1
    [rollout] = await play(sees, PICTURES, looks=0, engine=counting(7))
    assert rollout.stop is StopReason.MISALIGNED and rollout.stop.is_infrastructure and not rollout.ledger.turns
    assert (
        f"read 7 prompt tokens, but the ledger has {len(rollout.ledger.expanded.ids)}, images" in rollout.reason
        and asked > 7
    )
    metrics = StepRollouts(finished=[rollout]).metrics(0)
    assert metrics["lost/misaligned"] == metrics["rollout/lost"] == 1 and metrics["rollout/count"] == 0


async def test_image_beyond_the_token_limit_ends_the_rollout_before_generation(sees: Path) -> None:
    [rollout] = await play(sees, [picture(1, 64, 64)], looks=9, room=600)
    assert rollout.stop is StopReason.LENGTH_ROLLOUT and "does not fit" in rollout.reason
    assert len(rollout.ledger.expanded) < 600 < len(rollout.ledger.expanded) + 100
    assert rollout.ledger.entries[-1].parts[1] == picture(1, 64, 64) and not rollout.ledger.entries[-1].spans


async def test_fifty_images_keep_their_order(sees: Path) -> None:
    shown = Task("t", ({"role": "user", "content": chat_content([picture(number) for number in range(50)])},))
    [rollout] = await play(sees, PICTURES, looks=0, task=shown)
    assert rollout.stop is StopReason.DONE
    assert rollout.ledger.images == tuple(picture(number) for number in range(50))
