"""Runs with images: storage, display and replay."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from transformers import AutoModelForImageTextToText

from tests.trainer.policy_scripts import encode_turns, render_calls
from tests.trainer.rollout_strategies import bitwise_key
from tests.trainer.vision.vision_models import loaded, picture
from tests.trainer.vision.vision_rollouts import play
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import ToolsAndFeedback
from trainer.storage.rollout_line import BlobFolder, dump_rollout, load_rollout
from trainer.template import Template
from trainer.train.job import Job

PICTURES = [picture(1), picture(2, 24, 8)]


async def rolled(folder: Path, count: int = 1) -> list[Rollout]:
    """Two looks and an answer."""
    template = Template.load(folder)
    turns = [render_calls(("look", {"number": 0})), render_calls(("look", {"number": 1})), "Two cats."]
    found = []
    for _ in range(count):
        scripted = iter(encode_turns(template, *turns))
        engine = ScriptedEngine(lambda ids, sampling, key, scripted=scripted: next(scripted))  # type: ignore[misc]
        found += await play(folder, PICTURES, template=template, engine=engine, stepper=ToolsAndFeedback())
    return found


async def test_image_is_stored_once(sees: Path, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    rollouts = await rolled(sees, 3)
    lines = [dump_rollout(rollout, blobs) for rollout in rollouts]
    assert {*os.listdir(tmp_path)} == {one.digest for one in PICTURES}
    assert not any(base64.b64encode(one.data)[:40] in line for one in PICTURES for line in lines)
    for rollout, line in zip(rollouts, lines, strict=True):
        again = load_rollout(line, blobs)
        assert bitwise_key(again.ledger) == bitwise_key(rollout.ledger)
        assert again.ledger.expanded.ids == rollout.ledger.expanded.ids


def test_saved_policy_loads_with_its_image_processor(sees: Path, tmp_path: Path) -> None:
    class Saved:
        model = sees

    loaded(sees).save_pretrained(tmp_path)
    Job.copy_tokenizer_files(Saved, tmp_path)  # type: ignore[arg-type]
    assert AutoModelForImageTextToText.from_pretrained(tmp_path).num_parameters() == loaded(sees).num_parameters()
    template = Template.load(tmp_path)
    assert template.image_processor is not None and template.image_processor.prepare(PICTURES[1]).token_count == 3
