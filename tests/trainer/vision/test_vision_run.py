"""A run keeps each picture once, shows where it stood, and can be played again."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

from rich.console import Console
from transformers import AutoModelForImageTextToText

from tests.trainer.rollouts import bits
from tests.trainer.scripts import calling, says
from tests.trainer.vision.played import play
from tests.trainer.vision.seeing import loaded, picture
from trainer.engine.scripted import ScriptedEngine
from trainer.replay import differs
from trainer.replay import says as said_before
from trainer.run.blobs import Folder
from trainer.run.line import dump, load
from trainer.run.rollout import Rollout
from trainer.steps import ToolsAndFeedback
from trainer.template import Template
from trainer.train.job import Job
from trainer.view.show import show
from trainer.view.why import why

PICTURES = [picture(1), picture(2, 24, 8)]


async def rolled(folder: Path, count: int = 1) -> list[Rollout]:
    """Two looks and an answer."""
    template = Template.load(folder)
    turns = [calling(("look", {"number": 0})), calling(("look", {"number": 1})), "Two cats."]
    found = []
    for _ in range(count):
        said = iter(says(template, *turns))
        engine = ScriptedEngine(lambda ids, sampling, key, said=said: next(said))  # type: ignore[misc]
        found += await play(folder, PICTURES, template=template, engine=engine, stepper=ToolsAndFeedback())
    return found


async def test_a_picture_is_kept_once_however_often_it_was_shown(sees: Path, tmp_path: Path) -> None:
    blobs = Folder(tmp_path)
    rollouts = await rolled(sees, 3)
    lines = [dump(rollout, blobs) for rollout in rollouts]
    assert {*os.listdir(tmp_path)} == {one.digest for one in PICTURES}
    assert not any(base64.b64encode(one.data)[:40] in line for one in PICTURES for line in lines)
    for rollout, line in zip(rollouts, lines, strict=True):
        again = load(line, blobs)
        assert bits(again.ledger) == bits(rollout.ledger)
        assert again.ledger.expanded.ids == rollout.ledger.expanded.ids


async def test_a_rollout_with_pictures_is_played_again_to_the_same_ids(sees: Path) -> None:
    [before] = await rolled(sees)
    engine = ScriptedEngine(said_before(before))
    [after] = await play(sees, PICTURES, engine=engine, stepper=ToolsAndFeedback())
    assert differs(before, after) == "" and after.ledger.places == before.ledger.places


async def test_pictures_are_named_at_their_place(sees: Path) -> None:
    [rollout] = await rolled(sees)
    decode = Template.load(sees).tokens.decode
    first, second = rollout.ledger.places
    console = Console(width=200, record=True, file=io.StringIO())
    show([rollout], console, rollout=0, decode=decode)
    shown = console.export_text()
    size = len(PICTURES[1].data)
    assert f"▣ image (image/png, {size:,} bytes) at tokens {second.start}-{second.start}, seen as 3" in shown
    assert "<|vision_start|><|image_pad|><|vision_end|>" in shown
    told = why([rollout], 0, second.start, decode)
    assert f"stands for  image 2 (image/png, {size:,} bytes), seen as 3 tokens" in str(told)
    assert not told.trained and not why([rollout], 0, first.start - 1).shows
    assert why([rollout], 0, first.start).requests == 2


def test_what_is_saved_loads_with_its_image_processor(sees: Path, tmp_path: Path) -> None:
    class Saved:
        model = sees

    loaded(sees).save_pretrained(tmp_path)
    Job.spoken(Saved, tmp_path)  # type: ignore[arg-type]
    assert AutoModelForImageTextToText.from_pretrained(tmp_path).num_parameters() == loaded(sees).num_parameters()
    template = Template.load(tmp_path)
    assert template.eyes is not None and template.eyes.look(PICTURES[1]).width == 3
