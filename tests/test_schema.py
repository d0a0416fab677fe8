"""Tests of argument validation, safe names and strict schemas."""

from __future__ import annotations

import string

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.schema import ArgumentChecker, SchemaError, drop_nulls, safe_name, strict_schema

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
def test_invalid_arguments_are_explained_with_a_fix(arguments: str, words: str) -> None:
    mistake = ArgumentChecker(POINT).explain_error(arguments)
    assert mistake is not None and words in mistake
    assert len(mistake) < 1500


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "remote references are not fetched"),
        ({"$ref": "file:///etc/passwd"}, "not a usable JSON Schema"),
        ({"$ref": "#/$defs/nowhere"}, "not a usable JSON Schema"),
        ({"type": 3}, "not a usable JSON Schema"),
        ({"properties": {"a": {"pattern": "("}}}, "not a usable JSON Schema"),
        (nested(100), "nested deeper than"),
        (nested(100_000), "nested deeper than"),
    ],
)
def test_unusable_schema_is_refused_with_the_reason(schema: dict[str, object], words: str) -> None:
    with pytest.raises(SchemaError, match=words.replace("$", r"\$")):
        ArgumentChecker(schema)


SAFE = set(string.ascii_letters + string.digits + "_-")


@given(st.text(max_size=100))
def test_safe_name_is_accepted_by_openai_clients(name: str) -> None:
    safe = safe_name(name)
    assert 0 < len(safe) <= 64 and set(safe) <= SAFE
    assert safe_name(safe) == safe


def test_strict_schema_closes_objects_and_requires_properties() -> None:
    word = {"type": "string"}
    inner = {"type": "object", "properties": {"b": word, "c": {"enum": ["a", 1]}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": inner}, "o": inner}, "required": ["o"]}
    nullable = {"anyOf": [{"enum": ["a", 1]}, {"type": "null"}]}
    closed = {"required": ["b", "c"], "additionalProperties": False}
    inner = inner | {"properties": {"b": word, "c": nullable}} | closed
    properties = {"a": {"type": ["array", "null"], "items": inner}, "o": inner}
    assert strict_schema(schema) == schema | closed | {"properties": properties, "required": ["a", "o"]}


def test_drop_nulls_reverts_the_nulls_of_strict_mode() -> None:
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
    closed = strict_schema(schema)
    written = {"a": 1, "b": None, "c": {"d": None}, "e": None}
    assert closed is not None and jsonschema_rs.is_valid(closed, written)
    assert drop_nulls(written, schema) == {"a": 1, "b": None, "c": {}, "e": None}
