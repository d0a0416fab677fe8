"""Bounded JSON parsing reads what the standard library reads, and refuses what is too much."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bounded_json import MAX_DEPTH, JsonLimitError, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, min_size=1, max_size=4) | st.dictionaries(st.text(), inner, min_size=1, max_size=4),
    max_leaves=20,
)


def count_values(value: object) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_values, children))


@given(VALUES, st.booleans())
def test_value_is_refused_exactly_if_it_has_more_values_than_allowed(value: object, is_ascii: bool) -> None:
    text, count = json.dumps(value, ensure_ascii=is_ascii), count_values(value)
    assert loads(text, count) == loads(text.encode("utf-8", "replace"), count) == value
    with pytest.raises(JsonLimitError):
        loads(text, count - 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" + "{}," * 100_000 + "{}]", "more than 100000 values"),
        ('""' * 300_000 + "[" * 101_000, "more than 100000 values"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "nested deeper"),
        ('["\\ud83d",' + "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2) + "]", "nested deeper"),
        ("[" * 50_000, "nested deeper"),
    ],
)
def test_too_much_is_refused(text: str, words: str) -> None:
    with pytest.raises(JsonLimitError, match=words):
        loads(text)
