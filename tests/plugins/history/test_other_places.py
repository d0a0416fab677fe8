"""Shortened histories and sub-agents with images, and in rollout workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.types import Text, ToolResult
from mtrl_plugins.history.compaction import Compaction
from mtrl_plugins.history.delegate import DelegatePlayer
from mtrl_plugins.history.delegate_settings import DelegateSettings
from mtrl_plugins.history.settings import HistorySettings
from mtrl_plugins.trl.reward_functions import reward_arguments
from mtrl_plugins.workers.settings import WorkerSettings
from mtrl_plugins.workers.worker_job import make_worker_job
from mtrl_plugins.workers.worker_pool import WorkerPool
from tests.plugins.history.long_chats import REQUEST, delegate
from tests.plugins.workers.pools import write_tools
from tests.trainer.policy_scripts import encode_turns, make_gateway, make_tasks, render_calls
from tests.trainer.vision.vision_models import picture, seeing_model
from trainer.engine.base import Engine, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.reward.attempt import Attempt
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.rollout.steppers import ToolsAndFeedback
from trainer.rollout.task import Task
from trainer.setup import load_template, make_stepper
from trainer.setup import make_gateway as make_job_gateway
from trainer.template import Template

PICTURE = picture(3)
LIMITS = {"assistant_turns": 30, "rollout_tokens": 1500, "turn_tokens": 90}


class Policy:
    """Gives the task to a sub-agent, then calls a tool so many times; the sub-agent calls it as often."""

    def __init__(self, template: Template, call: str, count: int = 6) -> None:
        self.template, self.call, self.count = template, call, count
        self.turns: Counter[bool] = Counter()

    def __call__(self, ids: Sequence[int], sampling: Sampling | None = None, key: str = "") -> Answer:
        text = self.template.tokenizer.decode(tuple(ids))
        asked = text.rpartition("<|im_start|>user")[2]
        if REQUEST in asked and "assistant" in asked[-30:]:
            return encode_turns(self.template, "So far.")[0]
        is_child = "You are a sub-agent" in text
        self.turns[is_child] += 1
        number = self.turns[is_child]
        turns = [delegate("Look.")] * (not is_child) + [self.call] * self.count
        return encode_turns(self.template, turns[number - 1] if number <= len(turns) else "Seen.")[0]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("sees"))


@pytest.mark.parametrize("kind", ["summarise", "window"])
async def test_images_stay_with_the_ids_that_stand_for_them(seeing: Path, kind: str) -> None:
    async def look() -> ToolResult:
        """Shows a picture."""
        return ToolResult((Text("Here: " + "word " * 30), picture(1), Text("seen.")))

    template = Template.load(seeing)
    assert template.image_processor is not None
    history: Any = Compaction(HistorySettings(kind=kind, at=0.25, request=REQUEST), ToolsAndFeedback())
    player = DelegatePlayer(DelegateSettings(turns=20), history, in_order=False)
    content = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is it?"}]
    task = Task("t", ({"role": "user", "content": content},))
    limits = RolloutLimits.model_validate(LIMITS | {"rollout_tokens": 2400})
    engine = ScriptedEngine(Policy(template, render_calls(("look", {}))))
    with anyio.fail_after(60):
        async with make_gateway(look) as gateway, engine:
            runner = player.wrap(RolloutRunner(engine, template, gateway, limits, stepper=history))
            rollout = await runner.run(task, group="g")
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) > 3, rollout.reason
    image_id = template.image_processor.family.image_id
    for request in engine.requests:
        assert len(request.images) == request.ids.count(image_id)
    prompts = {request.ids: request.images for request in engine.requests}
    for ledger in rollout.ledgers:
        for start, entry in zip(ledger.starts, ledger, strict=True):
            if entry.author is Author.POLICY:
                shown = tuple(span.medium for span in ledger.media_spans if span.start < start)
                assert prompts[ledger.ids[:start]] == shown
        assert len(ledger.expanded) > len(ledger) or not ledger.images
    assert rollout.ledger.images[0] == PICTURE, "the task's image begins each of its chats"
    arguments = reward_arguments([Attempt(task, rollout, decoder=template)], ())
    (prompt,), (completion,) = arguments["prompts"], arguments["completions"]
    answers = [part for message in completion if message["role"] == "tool" for part in message["content"]]
    assert prompt[0]["content"][0]["image"].size == (16, 16)
    assert sum("image" in part for part in answers if isinstance(part, dict)) == 6, "those of its own chats"


def make_settings(folder: Path) -> BaseRolloutSettings:
    history = {"kind": "summarise", "at": 0.5, "request": REQUEST}
    values = {
        "tools": str(folder / "tools"),
        "limits": LIMITS,
        "seed": 3,
        "history": history,
        "delegate": {"turns": 20},
    }
    return BaseRolloutSettings.model_validate(values)


SAFE = render_calls(("safe", {"text": "word " * 12}))


def make_runner(settings: BaseRolloutSettings, folder: Path, engine: Engine) -> RolloutRunner:
    template, gateway = load_template(folder / "model", settings.template), make_job_gateway(settings)
    return RolloutRunner(engine, template, gateway, settings.limits, stepper=make_stepper(settings), seed=settings.seed)


async def play_here(settings: BaseRolloutSettings, folder: Path, engine: Engine) -> Rollout:
    """Plays the rollout as a run of one process does."""
    runner, part = make_runner(settings, folder, engine), DelegateSettings.of(settings)
    assert part is not None
    with anyio.fail_after(60):
        async with runner.gateway:
            return await part.make_player(settings).wrap(runner).run(make_tasks("t")[0], group="g")


def without_times(rollout: Rollout) -> list[Any]:
    return [[replace(entry, info={}, cached_tokens=0) for entry in ledger] for ledger in rollout.ledgers]


async def test_worker_plays_them_as_this_process_does(tmp_path: Path) -> None:
    folder = write_tools(tmp_path / "job")
    settings = make_settings(folder)
    template = load_template(folder / "model", settings.template)
    expected = await play_here(settings, folder, ScriptedEngine(Policy(template, SAFE)))
    engine = ScriptedEngine(Policy(template, SAFE))
    job = make_worker_job(settings, folder / "model", template, engine, 60.0)
    with anyio.fail_after(150):
        async with WorkerPool(WorkerSettings(workers=1), job, engine, folder, print) as pool:
            runner = pool.wrap(make_runner(settings, folder, engine))
            rollout = await runner.run(make_tasks("t")[0], group="g")
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) > 3, rollout.reason
    assert without_times(rollout) == without_times(expected) and rollout.infos == expected.infos
    assert [span.phase for span in rollout.timeline] == [span.phase for span in expected.timeline]
