"""The bounded JSON parser reads what the standard library reads, and refuses what is too much."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import bounded_json
from gateway.bounded_json import MAX_DEPTH, JsonLimitError, loads_large, loads_small

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_every_value_is_read_as_it_was_written(value: object, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert loads_large(text) == json.loads(text) == value
    assert loads_small(text) == value


@given(st.text(alphabet='{}[]",:\\u0123456789.eE+-truefalsn \n', max_size=30))
def test_text_is_refused_exactly_if_the_standard_library_refuses_it(text: str) -> None:
    try:
        expected = json.loads(text, strict=False)
    except ValueError:
        with pytest.raises(ValueError):
            loads_large(text)
    else:
        assert loads_large(text) == expected


@given(st.text(alphabet=st.sampled_from('a"\\\n\u1234\U0001f600\ud83d'), max_size=40), st.integers(13, 20))
def test_strings_do_not_depend_on_the_size_of_pieces(text: str, size: int) -> None:
    written = json.dumps(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "_STRING_PIECE", size)
        assert loads_large(written) == json.loads(written)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" + "{}," * 100_000 + "{}]", "more than 100000 values"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper"),
        ("9" * 5000, "digits"),
        ("1." + "9" * 1_000_000, "digits"),
    ],
)
def test_too_much_is_refused(text: str, words: str) -> None:
    with pytest.raises(JsonLimitError, match=words):
        loads_large(text)


def test_deepest_allowed_value_is_read_by_both() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert loads_small(text) == loads_large(text)
    with pytest.raises(JsonLimitError):
        loads_small(f"[{text}]")
