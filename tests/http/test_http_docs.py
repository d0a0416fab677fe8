"""/openapi.json and /docs: complete, valid, and asking no other host for anything."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import pytest

from gateway.http.app import ROOMS
from gateway.http.docs import _page
from gateway.http.openapi import OPERATIONS, document
from tests.http.rooms import Caller


def references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [found for item in node for found in references(item)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
    return own + [found for item in node.values() for found in references(item)]


async def test_the_document_is_served_as_it_is(ask: Caller) -> None:
    served = (await ask("GET", "/openapi.json")).json()
    assert served == document() and served["openapi"] == "3.1.0"


def test_every_room_is_documented_and_nothing_else_is() -> None:
    documented = {(one.path, one.method.upper()) for one in OPERATIONS}
    assert documented == {(path, method) for path, rooms in ROOMS.items() for method in rooms}


def test_every_reference_leads_somewhere_and_every_shape_is_a_schema() -> None:
    spec = document()
    schemas = spec["components"]["schemas"]
    assert {reference.removeprefix("#/components/schemas/") for reference in references(spec)} <= set(schemas)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)


def test_operations_have_names_of_their_own_and_declare_their_path() -> None:
    operations = [(path, one) for path, methods in document()["paths"].items() for one in methods.values()]
    names = [one["operationId"] for _, one in operations]
    assert len(set(names)) == len(names)
    for path, one in operations:
        declared = {parameter["name"] for parameter in one["parameters"] if parameter["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path))


def test_fields_are_described() -> None:
    schemas = document()["components"]["schemas"]
    assert "Unix time" in schemas["Begun"]["properties"]["expires_at"]["description"]
    assert schemas["BeginRequest"]["additionalProperties"] is False


async def test_the_page_asks_no_other_host(ask: Caller) -> None:
    answer = await ask("GET", "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]", answer.text)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])


@pytest.mark.parametrize("word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="])
def test_the_page_never_reads_text_as_markup(word: str) -> None:
    page, _ = _page()
    assert word not in page.decode()


def test_the_page_reads_in_light_and_dark_and_on_a_narrow_screen() -> None:
    page = _page()[0].decode()
    assert "color-scheme: light dark" in page and "width=device-width" in page and "overflow-wrap" in page
