"""Schemas and arguments come from strangers: both are checked, bounded, and answered in words."""

from __future__ import annotations

import json
import string

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.schema import Checker, SchemaError, safe_name
from gateway.strict import drop_nulls, strict

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["x"],
    "additionalProperties": False,
}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"x": "1"}', 'x: "1" is not of type "integer"'),
        ("{}", '"x" is a required property'),
        ('{"x": 1, "y": 2}', "'y' was unexpected"),
        ('{"x": 1, "unit": "mile"}', 'unit: "mile" is not one of "m" or "km"'),
        ("[1]", "must be one JSON object, not an array"),
        ("3", "not a number"),
        ("null", "not null"),
        ('{"x": 1', "not valid JSON"),
        ('{"x": NaN}', "NaN is not JSON"),
        ('{"x": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_mistake_is_named_in_words_that_tell_how_to_mend_it(arguments: str, words: str) -> None:
    mistake = Checker(POINT).mistake(arguments)
    assert mistake is not None and words in mistake
    assert len(mistake) < 1500


def test_the_message_outlines_what_was_expected() -> None:
    mistake = Checker(POINT).mistake("{}")
    assert mistake is not None and 'Expected: {x: integer, unit: "m" | "km" (optional)}' in mistake


def test_no_arguments_at_all_are_an_empty_object() -> None:
    assert Checker({"type": "object"}).mistake("") is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "not a usable JSON Schema"),
        ({"$ref": "#/$defs/nowhere"}, "not a usable JSON Schema"),
        ({"type": 3}, "not a usable JSON Schema"),
        ({"properties": {"a": {"pattern": "("}}}, "not a usable JSON Schema"),
        (nested(100), "nested deeper than"),
        (nested(100_000), "nested deeper than"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_its_reason(schema: dict[str, object], words: str) -> None:
    with pytest.raises(SchemaError, match=words.replace("$", r"\$")):
        Checker(schema)


def test_a_schema_that_only_points_at_itself_ends() -> None:
    assert Checker({"$ref": "#"}).mistake('{"a": 1}') is None
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert Checker(loop).mistake('{"a": 1}') is None


def test_a_recursive_schema_is_followed() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}
    checker = Checker({"$defs": {"node": node}, "$ref": "#/$defs/node"})
    assert checker.mistake('{"next": {"next": {"n": 1}}}') is None
    assert "next.next.n" in str(checker.mistake('{"next": {"next": {"n": "1"}}}'))


def test_a_pattern_made_to_search_for_ever_is_bounded() -> None:
    checker = Checker({"properties": {"a": {"pattern": "^(a|a)*$"}}})
    assert checker.mistake(json.dumps({"a": "a" * 5000 + "!"})) is not None


def test_patterns_that_look_ahead_still_work() -> None:
    checker = Checker({"properties": {"a": {"pattern": r"^(?!x)\w+$"}}})
    assert checker.mistake('{"a": "y"}') is None and checker.mistake('{"a": "x"}') is not None


SAFE = set(string.ascii_letters + string.digits + "_-")


@given(st.text(max_size=100))
def test_a_safe_name_is_one_that_any_openai_client_accepts(name: str) -> None:
    safe = safe_name(name)
    assert 0 < len(safe) <= 64 and set(safe) <= SAFE
    assert safe_name(safe) == safe


@given(st.sets(st.text(max_size=80), min_size=2, max_size=30))
def test_different_names_stay_different(names: set[str]) -> None:
    assert len({safe_name(name) for name in names}) == len(names)


def test_a_name_that_is_safe_already_stays_as_it_is() -> None:
    assert safe_name("get-weather_2") == "get-weather_2"
    assert safe_name("search.web").startswith("search_web_")


SCALARS = st.sampled_from([{"type": "string"}, {"type": "integer"}, {"enum": ["a", 1]}, {"type": ["string", "null"]}])
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
            },
            st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
            st.sets(st.sampled_from("abcd")),
        ),
    ),
    max_leaves=6,
)


@given(SCHEMAS)
def test_a_strict_schema_closes_every_object_and_requires_every_property(schema: dict[str, object]) -> None:
    closed = strict({"type": "object", "properties": {"root": schema}})
    assert closed is not None
    nodes: list[object] = [closed]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if "object" in node.get("type", ()) and "properties" in node:
                assert node["additionalProperties"] is False
                assert node["required"] == list(node["properties"])
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    assert jsonschema_rs.meta.is_valid(closed)


def test_what_strict_mode_has_no_words_for_is_left_alone() -> None:
    assert strict({"type": "object", "additionalProperties": {"type": "string"}}) is None
    assert strict({"type": "object", "properties": {"a": {"oneOf": [{}, {}]}}}) is None
    assert strict({"anyOf": [{"type": "object"}]}) is None


def test_the_nulls_that_strict_mode_asked_for_are_taken_back() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["string", "null"]},
            "c": {"type": "object", "properties": {"d": {"type": "string"}}},
            "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["a"],
    }
    closed = strict(schema)
    written = {"a": 1, "b": None, "c": {"d": None}, "e": None}
    assert closed is not None and jsonschema_rs.is_valid(closed, written)
    assert drop_nulls(written, schema) == {"a": 1, "b": None, "c": {}, "e": None}
