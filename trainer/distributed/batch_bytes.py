"""Writes a train batch as bytes for the other ranks, and reads it: JSON, since a pickle could run code."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from gateway.types import Image
from trainer.algorithms.train_batch import TrainBatch, TrainSequence
from trainer.ledger import MediaSpan


def write_batch(batch: TrainBatch) -> bytes:
    """All fields; each image once."""
    images = list(
        dict.fromkeys(
            span.medium
            for sequence in batch.sequences
            for span in sequence.media_spans
            if isinstance(span.medium, Image)
        )
    )
    content = asdict(replace(batch, sequences=()))
    content["groups_with_signal"] = sorted(batch.groups_with_signal)
    content["sequences"] = [_sequence_fields(sequence, images) for sequence in batch.sequences]
    content["images"] = write_images(images)
    return json.dumps(content).encode()


def read_batch(content: bytes) -> TrainBatch:
    """The batch, equal to the one that was written."""
    values: dict[str, Any] = json.loads(content)
    images = read_images(values.pop("images"))
    sequences = tuple(_read_sequence(sequence, images) for sequence in values.pop("sequences"))
    lists: dict[str, Any] = {name: tuple(value) for name, value in values.items()}
    lists["turn_scores"] = tuple(map(tuple, values["turn_scores"]))
    lists["groups_with_signal"] = frozenset(values["groups_with_signal"])
    return TrainBatch(sequences=sequences, **lists)


def write_images(images: Sequence[Image]) -> list[list[str]]:
    """Images as JSON can hold them."""
    return [[b64encode(image.data).decode(), image.mime] for image in images]


def read_images(images: Sequence[Sequence[str]]) -> list[Image]:
    """What `write_images` wrote."""
    return [Image(b64decode(data), mime) for data, mime in images]


def _sequence_fields(sequence: TrainSequence, images: Sequence[Image]) -> dict[str, Any]:
    values = {field.name: getattr(sequence, field.name) for field in fields(sequence)}
    values["media_spans"] = [
        (images.index(span.medium), span.start, span.stop)
        for span in sequence.media_spans
        if isinstance(span.medium, Image)
    ]
    return values


def _read_sequence(values: dict[str, Any], images: Sequence[Image]) -> TrainSequence:
    spans = tuple(MediaSpan(images[index], start, stop) for index, start, stop in values.pop("media_spans"))
    return TrainSequence(**values, media_spans=spans)
