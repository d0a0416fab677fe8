"""Large JSON is written in small steps, which together write what the standard library writes."""

from __future__ import annotations

import json
from json import JSONEncoder

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import large_json
from gateway.large_json import is_large, write_json

KEYS = st.text(max_size=30) | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)


@given(VALUES)
def test_large_values_are_written_as_the_standard_library_writes_them(value: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "PIECE_LENGTH", 7)
        patch.setattr(is_large, "__defaults__", (60,))
        assert write_json(JSONEncoder(separators=(",", ":")), value) == json.dumps(value, separators=(",", ":"))
        assert write_json(JSONEncoder(ensure_ascii=False), value) == json.dumps(value, ensure_ascii=False)
