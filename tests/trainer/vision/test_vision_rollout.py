"""Rollouts with tool images, up to the gradient."""

from __future__ import annotations

from pathlib import Path

import torch

from gateway.media.media_filter import REFUSED_METRIC
from gateway.types import Image, Text
from tests.sample_images import decompression_bomb
from tests.trainer.policy_scripts import encode_turns, render_calls
from tests.trainer.vision.vision_models import picture
from tests.trainer.vision.vision_rollouts import lesson_of, play
from trainer.algorithms.settings import AlgorithmSettings
from trainer.engine.base import Generation, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import CALLS_INFO, ToolsAndFeedback
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


async def test_hostile_image_is_replaced_by_a_message_and_the_rollout_trains(sees: Path) -> None:
    rollouts = await play(sees, [PICTURES[0], Image(decompression_bomb())], n=2)
    for rollout in rollouts:
        assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
        seen, refused = (entry for entry in rollout.ledger if entry.author is Author.TOOL)
        (told,) = (part.text for part in refused.parts if isinstance(part, Text) and "left out" in part.text)
        assert told in str(refused.messages) and (len(seen.spans), len(refused.spans)) == (1, 0)
        assert (
            refused.info[CALLS_INFO][0]["metrics"] == {REFUSED_METRIC: 1} and "metrics" not in seen.info[CALLS_INFO][0]
        )
    policy = Policy.load(sees, UpdateSettings())
    assert PolicyUpdater(policy, GRPO, exact=True).train_step(lesson_of(rollouts, GRPO))["mismatch/max"] < 1e-5


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
