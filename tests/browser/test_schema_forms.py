"""Tests of the forms made from JSON Schemas: any schema yields a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.gateway import Gateway
from tests.browser.page import Page
from tests.http.api_client import http_sources
from tests.live_server import LiveServer, live_server

DEEP: Any = {"type": "string"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"in": DEEP}, "required": ["in"]}

UNUSUAL_SCHEMAS: dict[str, Any] = {
    "nothing": {},
    "a list of anything": {"type": "object", "properties": {"x": {"type": "array"}}},
    "items that are true": {"type": "object", "properties": {"x": {"type": "array", "items": True, "minItems": 2}}},
    "a property that is true": {"type": "object", "properties": {"x": True}},
    "a property that is false": {"type": "object", "properties": {"x": False}},
    "a reference to nowhere": {"type": "object", "properties": {"x": {"$ref": "#/$defs/None"}}},
    "a reference to itself": {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}, "required": ["x"]},
    "references in a ring": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
    },
    "an object that needs itself": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "joined with itself": {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"},
    "a choice of itself": {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"},
    "a reference to another host": {"type": "object", "properties": {"x": {"$ref": "https://example.org/s.json"}}},
    "names that mean something elsewhere": {
        "type": "object",
        "properties": {"__proto__": {"type": "string"}, "constructor": {"type": "string"}, "": {"type": "string"}},
        "required": ["constructor"],
    },
    "no choice": {"type": "object", "properties": {"x": {"anyOf": []}, "y": {"enum": []}, "z": {"type": []}}},
    "several kinds": {"type": "object", "properties": {"x": {"type": ["string", "number", "null"]}}},
    "allOf": {"allOf": [{"properties": {"x": {"type": "string"}}}, {"required": ["x"]}], "type": "object"},
    "a map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "a kind that is none": {"type": "object", "properties": {"x": {"type": "file"}}},
    "descriptions that are none": {"type": "object", "properties": {"x": {"type": "string", "description": {"a": 1}}}},
    "very deep": DEEP,
    "no object at all": {"type": "string"},
}
_READ_FORM = """Promise.all([import("/ui/schema_form.js"), import("/ui/schema.js")]).then(([form, schema]) => {
  const made = form.control(%s), text = schema.schemaView(%s, %s), value = made.read();
  document.querySelector("main").replaceChildren(made.node, text ?? "");
  return JSON.stringify(value === form.ABSENT ? null : value); })"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(lambda: Gateway(http_sources())) as served:
        yield served


def test_no_schema_breaks_the_form(page: Page, server: LiveServer) -> None:
    page.open(f"{server.url}/ui")
    values = {name: page.js(_READ_FORM % ((json.dumps(schema),) * 3)) for name, schema in UNUSUAL_SCHEMAS.items()}
    assert json.loads(values["names that mean something elsewhere"]) == {"constructor": ""}
    assert json.loads(values["items that are true"]) == {"x": [None, None]}
    assert json.loads(values["allOf"]) == {"x": ""}


DISTINCT_UNION: Any = {
    "oneOf": [
        {"properties": {"k": {"const": "a"}, "x": {"type": "string"}}, "required": ["k", "x"], "type": "object"},
        {"properties": {"k": {"const": "b"}, "y": {"type": "integer"}}, "required": ["k", "y"], "type": "object"},
    ]
}
VALUES: list[tuple[Any, Any]] = [
    ({"properties": {"x": {"type": "string"}}}, {"x": "a\nb"}),
    ({"properties": {"x": {"type": "array", "items": {"type": "integer"}}}}, {"x": [1, 2]}),
    ({"properties": {"x": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}, {"x": "7"}),
    ({"properties": {"x": {"type": ["string", "null"]}}}, {"x": None}),
    ({"properties": {"x": {"enum": ["a", {"b": 1}]}}}, {"x": {"b": 1}}),
    ({"properties": {"x": {"type": "object", "properties": {"y": {"type": "boolean"}}}}}, {"x": {"y": False}}),
    ({"properties": {"x": {"const": 4}}}, {"x": 4}),
    ({"properties": {"x": {}}}, {"x": [{"any": None}]}),
    ({"additionalProperties": {"type": "integer"}}, {"p": 1, "q": 2}),
    ({"type": "object"}, {"a": 1, "b": {"c": []}}),
    ({"properties": {"meta": {"type": "object"}}}, {"meta": {"a": 1}, "b": 2}),
    ({"properties": {"x": {"type": "string"}}, "patternProperties": {"^n_": {}}, "additionalProperties": False},
     {"n_1": 1}),
    ({"properties": {"x": {"type": "string"}}, "additionalProperties": False}, {"x": "a", "forbidden": 1}),
    ({"properties": {"x": {"type": "string"}, "y": {"enum": [1]}, "z": {"const": 1}}}, {"x": 7, "y": 2, "z": 3}),
    ({"properties": {"x": {"type": "array"}, "y": {"type": "string"}, "z": {"type": "object"}}},
     {"x": [], "y": "", "z": {}}),
    ({"properties": {"x": {"const": 4}, "y": {"anyOf": [{"const": 1}, {"const": 2}]}}}, {}),
    (DISTINCT_UNION, {"k": "b", "y": 3}),
    (DISTINCT_UNION, {"k": "c", "x": "", "z": True}),
    ({"properties": {"x": {"anyOf": [DISTINCT_UNION, {"type": "string"}]}}}, {"x": {"k": "b", "y": 3}}),
    ({"properties": {"x": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}}}, {"x": {"b": 1}}),
    ({"properties": {"x": {"prefixItems": [{"type": "string"}, {"type": "number"}], "type": "array"}}},
     {"x": ["a", 2.5]}),
]  # fmt: skip


def test_form_returns_its_initial_value(page: Page, server: LiveServer) -> None:
    page.open(f"{server.url}/ui")
    filled = 'import("/ui/schema_form.js").then(form => form.control(%s, {start: %s}).read())'
    for schema, value in VALUES:
        assert page.js(filled % (json.dumps(schema), json.dumps(value))) == value, schema


def test_form_refuses_input_that_it_would_change(page: Page, server: LiveServer) -> None:
    page.open(f"{server.url}/ui")
    read = (
        'import("/ui/schema_form.js").then(form => { const made = form.control(%s);'
        " made.node.querySelectorAll('button').forEach(one => one.click());"
        " made.node.querySelectorAll('input, textarea').forEach(one => { one.value = %s; });"
        " return made.read(); }).then(JSON.stringify, error => error.message)"
    )
    closed = {"properties": {"x": {"type": "integer"}}, "additionalProperties": False}
    free = {"type": "object"}
    for schema, written, expected in (
        (closed, "12345678901234567890", "would change 12345678901234567890"),
        (free, '{"a": [-12345678901234567890]}', "would change -12345678901234567890"),
        (closed, "1e400", "would change 1e400"),
        (free, '{"a": "12345678901234567890"}', '{"a":"12345678901234567890"}'),
        (free, "[1]", "Further properties are not a JSON object"),
        ({"properties": {"x": {}}}, '{"x": 1}', "x has a field of its own"),
    ):
        assert expected in page.js(read % (json.dumps(schema), json.dumps(written))), written
