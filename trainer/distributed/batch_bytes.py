"""Writes a train batch as bytes for the other ranks, and reads it: arrays behind a short header, since a pickle could
run code, and text would take seconds, in which the interpreter does nothing else."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from gateway.types import Image
from trainer.algorithms.train_batch import TrainBatch, TrainSequence
from trainer.ledger import MediaSpan

BOOLEANS = "B"
COLUMNS = {"ids": "i", "mask": BOOLEANS, "engine_logprobs": "d", "weights": "d", "turns": "i", "stale": BOOLEANS}
"""The lists of a sequence that have a value for each token, with their type; all ranks have machines of one kind."""
HEADER_BYTES = 8
"""The length of the header comes first."""


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
    header = {field.name: getattr(batch, field.name) for field in fields(batch)}
    header["groups_with_signal"] = sorted(batch.groups_with_signal)
    header["sequences"] = [_sequence_header(sequence, images) for sequence in batch.sequences]
    header["images"] = [[len(image.data), image.mime] for image in images]
    text = json.dumps(header).encode()
    columns = (_write_column(batch, name, kind) for name, kind in COLUMNS.items())
    return b"".join((len(text).to_bytes(HEADER_BYTES), text, *columns, *(image.data for image in images)))


def read_batch(content: bytes) -> TrainBatch:
    """The batch, equal to the one that was written."""
    start = HEADER_BYTES + int.from_bytes(content[:HEADER_BYTES])
    values: dict[str, Any] = json.loads(content[HEADER_BYTES:start])
    headers, sizes = values.pop("sequences"), values.pop("images")
    columns = []
    for name, kind in COLUMNS.items():
        lengths = [header["lengths"][name] for header in headers]
        columns.append(list(_read_column(memoryview(content)[start:], kind, lengths)))
        start += sum(lengths) * array(kind).itemsize
    images = []
    for size, mime in sizes:
        images.append(Image(content[start : start + size], mime))
        start += size
    sequences = tuple(
        _read_sequence(header, dict(zip(COLUMNS, row, strict=True)), images)
        for header, *row in zip(headers, *columns, strict=True)
    )
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


def _write_column(batch: TrainBatch, name: str, kind: str) -> bytes:
    """A list of all sequences, one behind the other: no single call holds the interpreter for long."""
    return b"".join(array(kind, getattr(sequence, name)).tobytes() for sequence in batch.sequences)


def _read_column(content: memoryview, kind: str, lengths: Sequence[int]) -> Iterator[list[Any]]:
    """The list of each sequence."""
    end = 0
    for length in lengths:
        values = array(kind, content[end : (end := end + length * array(kind).itemsize)].tobytes())
        yield list(map(bool, values)) if kind == BOOLEANS else values.tolist()


def _sequence_header(sequence: TrainSequence, images: Sequence[Image]) -> dict[str, Any]:
    return {
        "name": sequence.name,
        "rollout_index": sequence.rollout_index,
        "lengths": {name: len(getattr(sequence, name)) for name in COLUMNS},
        "media_spans": [
            (images.index(span.medium), span.start, span.stop)
            for span in sequence.media_spans
            if isinstance(span.medium, Image)
        ],
    }


def _read_sequence(header: dict[str, Any], columns: dict[str, Any], images: Sequence[Image]) -> TrainSequence:
    spans = tuple(MediaSpan(images[index], start, stop) for index, start, stop in header["media_spans"])
    return TrainSequence(header["name"], header["rollout_index"], **columns, media_spans=spans)
