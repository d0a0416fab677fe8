"""Training rows with images, as a rollout would have written them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gateway.types import Image
from trainer.algorithms.packing import BatchRow
from trainer.ledger import Author, Entry, Ledger
from trainer.vision.image_processor import ImageProcessor


def ledger_of(eyes: ImageProcessor, images: Sequence[Image], seed: int = 0) -> Ledger:
    """A task, then a turn and a picture for each, then a last turn."""
    draw = Random(seed)
    image, _, begin, end = eyes.family.banned_ids

    def words(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(200) for _ in range(count))

    def wrote(count: int) -> Entry:
        return Entry(Author.POLICY, words(count), logprobs=(-1.0,) * count, version=0, finish_reason="stop")

    ledger = Ledger((Entry(Author.TASK, words(5)),)) + wrote(3)
    for one in images:
        widths = (eyes.prepare(one).token_count,)
        ids = (*words(1), begin, image, end, *words(1))
        ledger += Entry(Author.TOOL, ids, parts=(one,), spans=((2, 3),), widths=widths)
        ledger += wrote(3)
    return ledger


def looked(eyes: ImageProcessor, images: Sequence[Image], seed: int = 0, advantage: float = 1.0) -> BatchRow:
    ledger = ledger_of(eyes, images, seed).expanded
    mine = [float(own) for own in ledger.mask]
    earned = [own * advantage for own in mine]
    return BatchRow("r", ledger.ids, ledger.mask, ledger.logprobs, earned, mine, media_spans=ledger.media_spans)
