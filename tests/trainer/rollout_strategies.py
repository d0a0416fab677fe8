"""Hypothesis strategies for ledgers and rollouts, and a bitwise comparison of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hypothesis import strategies as st

from gateway.types import Audio, Image, Outcome, Part, Resource, Text, ToolCall, Video
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, Span, StopReason

TEXT = st.text(st.characters(), max_size=12)  # Surrogates included: a model's JSON can hold them.
FLOATS = st.floats(width=64)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
BYTES = st.binary(max_size=8)
PARTS: st.SearchStrategy[Part] = st.one_of(
    st.builds(Text, TEXT),
    st.builds(Image, BYTES, TEXT),
    st.builds(Audio, BYTES, TEXT),
    st.builds(Video, BYTES, TEXT),
    st.builds(Resource, TEXT, st.none() | TEXT, st.none() | TEXT, st.none() | BYTES, st.none() | TEXT),
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    author = draw(st.sampled_from(Author))
    ids = tuple(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)))
    parts = tuple(draw(st.lists(PARTS, max_size=3)))
    media = sum(isinstance(part, Image | Audio | Video) for part in parts)
    span = st.tuples(st.integers(0, len(ids)), st.integers(0, len(ids))).map(lambda pair: (min(pair), max(pair)))
    policy = author is Author.POLICY
    answers = author in (Author.TOOL, Author.FEEDBACK)
    version = draw(st.none() | st.integers(0, 2**40))
    return Entry(
        author=author,
        ids=ids,
        messages=tuple(draw(st.lists(OBJECTS, max_size=2))),
        logprobs=tuple(draw(st.lists(FLOATS, min_size=len(ids), max_size=len(ids)))) if policy else None,
        version=version,
        earlier_versions=() if version is None or not ids else draw(st.just(()) | st.just(((version, 1),))),
        cached_tokens=draw(st.integers(0, 100)),
        finish_reason=draw(st.sampled_from([None, "", "stop", "length"])),
        parts=parts,
        spans=tuple(draw(st.lists(span, min_size=media, max_size=media))) if draw(st.booleans()) else (),
        calls=tuple(draw(st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2))),
        outcomes=tuple(draw(st.lists(st.sampled_from(Outcome), max_size=2))),
        reward=draw(st.none() | FLOATS) if answers else None,
        source=draw(TEXT),
        info=draw(OBJECTS),
    )


def ledgers() -> st.SearchStrategy[Ledger]:
    return st.lists(entries(), max_size=6).map(lambda ledger_entries: Ledger(tuple(ledger_entries)))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    stop = draw(st.sampled_from(StopReason))
    return Rollout(
        task=draw(TEXT),
        ledger=draw(ledgers()),
        step=draw(st.none() | st.integers(1, 2**40)),
        stop=stop,
        group=draw(TEXT),
        index=draw(st.integers(0, 2**40)),
        rewards={} if stop.is_infrastructure else draw(st.dictionaries(TEXT, FLOATS, max_size=2)),
        reason=draw(TEXT),
        timing=draw(st.dictionaries(TEXT, FLOATS, max_size=2)),
        timeline=tuple(draw(st.lists(st.builds(Span, TEXT, FLOATS, FLOATS), max_size=2))),
        infos=draw(OBJECTS),
    )


def bitwise_key(value: Any) -> Any:
    """A key that is equal for bitwise equal values of the same types: NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(value, float):
        return "nan" if value != value else struct.pack("<d", value)
    if is_dataclass(value):
        return type(value).__name__, [bitwise_key(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return [(key, bitwise_key(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bitwise_key(item) for item in value]
    return type(value).__name__, value
