"""Large JSON is written in pieces, which together are what the standard library writes."""

from __future__ import annotations

import json
from json import JSONEncoder

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import large_json
from gateway.large_json import LARGE, PIECE_LENGTH, TEXT_STYLE, JsonStyle, collect_pieces, is_large, measure

COMPACT = JsonStyle(JSONEncoder(separators=(",", ":")).encode)
KEYS = st.text(max_size=30) | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)


@given(VALUES)
def test_pieces_are_what_the_standard_library_writes(value: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "LARGE", 60)
        patch.setattr(large_json, "PIECE_LENGTH", 7)
        patch.setattr(is_large, "__defaults__", (60,))
        assert "".join(COMPACT.pieces(value)) == json.dumps(value, separators=(",", ":"))
        assert "".join(TEXT_STYLE.pieces(value)) == json.dumps(value, ensure_ascii=False)


def test_no_piece_is_much_larger_than_asked() -> None:
    value = {"a": "\x01" * 1_000_000, "b": [{"c": "x" * 100}] * 20_000, "d" * 300_000: None}
    pieces = collect_pieces(COMPACT.pieces(value))
    assert b"".join(pieces) == json.dumps(value, separators=(",", ":")).encode()
    assert max(map(len, pieces)) < 10 * PIECE_LENGTH


def test_measuring_ends_early_and_calls_no_methods_of_users() -> None:
    class Loud(dict[str, object]):
        def __len__(self) -> int:
            raise AssertionError("called")

    assert measure([[1] * 1000] * 10_000, 5000) < 200_000
    assert not is_large(Loud()) and is_large("x" * (LARGE + 1)) and not is_large({"a": 1})
