"""Whether an engine has the trainer's weights is told by how likely it finds a few ids, and what follows a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import torch

from gateway.media.picture import encoded, of_value
from gateway.types import Image
from trainer.engine.base import EngineError
from trainer.engine.sglang.environment import SIGHT
from trainer.engine.sglang.own import Finds
from trainer.engine.sglang.probe import NEWEST, told
from trainer.engine.sglang.request import pictured
from trainer.engine.sglang.wire import Wire
from trainer.vision.eyes import Eyes

PROMPT = tuple(range(2, 34))
"""Any will do, if every vocabulary has it: other weights find it otherwise."""
AFTER = 16
"""Ids that follow a picture: how likely they are tells what was seen."""
SIDE = 64
"""Of the picture, before it is brought to the size that the model takes."""
SCORE_S = 60.0


@dataclass(frozen=True, slots=True)
class Probe:
    ids: tuple[int, ...]
    compared: int
    """So many of its last ids: a picture before them is as many as it is wide."""
    images: tuple[Image, ...] = ()

    @property
    def remedy(self) -> str:
        return f"; it reads as the trainer does, and sees otherwise: was it started with {SIGHT}=0?" * bool(self.images)


def probes(eyes: Eyes | None) -> tuple[Probe, ...]:
    """Ids alone tell nothing of the part of a model that sees."""
    if eyes is None:
        return (Probe(PROMPT, len(PROMPT) - 1),)
    family = eyes.family
    words = tuple(token for token in range(PROMPT[0], len(PROMPT) + 99) if token not in family.barred)[: len(PROMPT)]
    before, behind = family.frame
    ids = (*words[:AFTER], *before, family.image, *behind, *words[AFTER:])
    return Probe(words, len(words) - 1), Probe(ids, len(words) - AFTER, (_picture(eyes),))


def _picture(eyes: Eyes) -> Image:
    """Of noise."""
    noise = torch.randint(256, (SIDE, SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return encoded(eyes.shown(encoded(of_value(noise))))


def found(finds: Finds, probe: Probe) -> Sequence[float]:
    """By the trainer."""
    return finds(probe.ids, probe.images)[-probe.compared :]


async def finding(wire: Wire, probe: Probe) -> list[float]:
    """By a server. In rollouts logprobs of a prompt are never asked for."""
    body = {
        "input_ids": probe.ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await wire.post("/generate", body | pictured(probe.images), within=SCORE_S)
    pairs = answer["meta_info"]["input_token_logprobs"][-probe.compared :]
    if tuple(pair[1] for pair in pairs) != probe.ids[-probe.compared :]:
        where = ", beside a picture, as releases did that are older" * bool(probe.images)
        raise EngineError(f"SGLang at {wire.url} reads other ids than it was given{where}: use {told(NEWEST)}")
    return [nan if pair[0] is None else float(pair[0]) for pair in pairs]  # JSON has no word for it.
