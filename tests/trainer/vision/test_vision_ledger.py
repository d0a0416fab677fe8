"""Ledgers with images: one id each for the engine, expanded for training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Image, Text
from trainer.ledger import Author, Entry, Ledger

PAD = 9
OTHERS = st.sampled_from([Author.TASK, Author.TOOL, Author.FEEDBACK])
STREAM = st.lists(st.one_of(st.integers(10, 12), st.just(PAD)), max_size=8)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """Text with pictures anywhere in it: first, last, side by side, or none; some without a place."""
    if draw(st.booleans()):
        ids = tuple(draw(st.lists(st.integers(10, 12), max_size=5)))
        return Entry(
            Author.POLICY, ids, logprobs=tuple(-float(token) for token in ids), version=draw(st.integers(0, 3))
        )
    ids = tuple(draw(STREAM))
    spans: list[tuple[int, int]] = []
    for place, token in enumerate(ids):
        if token == PAD:
            spans.append((place, place + 1))
        elif draw(st.booleans()):
            spans.append((place, place))
    spans = spans[:5]
    shown = {start for start, stop in spans if start < stop}
    ids = tuple(token if token != PAD or place in shown else 10 for place, token in enumerate(ids))
    widths = tuple(draw(st.integers(1, 6)) if start < stop else 0 for start, stop in spans)
    images = tuple(Image(bytes([number])) for number in range(len(spans)))
    return Entry(draw(OTHERS), ids, parts=(*images, Text("so")), spans=tuple(spans), widths=widths)


def mixes() -> st.SearchStrategy[Ledger]:
    return st.lists(entries(), max_size=6).map(lambda written: Ledger(tuple(written)))


@given(mixes())
def test_policy_ids_are_the_same_expanded_or_not(ledger: Ledger) -> None:
    wide = ledger.expanded
    for name in ("ids", "logprobs", "versions"):
        kept, seen = (
            [value for value, mine in zip(getattr(one, name), one.mask, strict=True) if mine] for one in (ledger, wide)
        )
        assert kept == seen
    assert sum(ledger.mask) == sum(wide.mask)
    assert len(wide.ids) == len(wide.mask) == len(wide.logprobs) == len(wide.versions)


@given(mixes())
def test_positions_map_to_those_of_the_expanded_ids(ledger: Ledger) -> None:
    wide = ledger.expanded
    there = [ledger.to_expanded(token) for token in range(len(ledger))]
    assert [wide.ids[token] for token in there] == list(ledger.ids)
    assert [wide.author_at(token) for token in there] == [ledger.author_at(token) for token in range(len(ledger))]
