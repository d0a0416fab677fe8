"""A real server, on a CPU, sees what the trainer sees: as wide, and as likely."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from tests.sglang.policy import AGREE
from tests.trainer.vision.seeing import logprobs, odd_pictures, picture, seeing_model
from trainer.engine.base import Sampling
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.server import Options, Server
from trainer.template import Template

OPTIONS = Options(context=512, tokens=16384, device="cpu", tokenizer=True)
SHOWN = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "image"}]
PICTURES = [picture(1, 56, 56), picture(2, 84, 56)]
ODD = odd_pictures(28, 56)
"""What is clear in a file, of sixteen bits, or not upright, a server would see otherwise."""


async def test_pictures_are_as_wide_and_what_is_written_as_likely_as_the_trainer_finds(tmp_path: Path) -> None:
    """SGLang takes rows of pixels for something else, where they are not of patches of 14 in two frames."""
    folder = seeing_model(tmp_path / "model", patch=14, frames=2)
    template = Template.load(folder)
    assert template.eyes is not None
    ids = template.open([{"role": "user", "content": SHOWN}])
    server = Server(folder, OPTIONS, log=tmp_path / "sglang.log")
    async with SGLangEngine([server], ByTensors()) as engine:
        assert engine.capabilities.images
        with anyio.fail_after(120):
            asked = Sampling(max_tokens=12, temperature=0)  # What is drawn may be so unlikely that float32 rounds more.
            first = await engine.generate(ids, asked, images=PICTURES)
            swapped = await engine.generate(ids, asked, images=PICTURES[::-1])
            odd = [await engine.generate(ids, replace(asked, max_tokens=4), images=[one, one]) for one in ODD.values()]
    pairs = [PICTURES, PICTURES[::-1], *([one, one] for one in ODD.values())]
    for written, images in zip((first, swapped, *odd), pairs, strict=True):
        assert written.read == len(template.eyes.sight(ids, images).ids)
        own = logprobs(folder, template.eyes, (*ids, *written.ids), images)[-len(written.ids) :]
        assert list(written.logprobs) == pytest.approx(own, abs=AGREE)
    assert first.logprobs[0] != swapped.logprobs[0]
