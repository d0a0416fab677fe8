"""/openapi.json and /docs: complete, valid, and asking no other host for anything."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import pytest

from gateway.http.app import OPERATIONS
from gateway.http.info_routes import _docs_page
from gateway.http.openapi import openapi_document
from tests.http.api_client import ApiClient


def references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [reference for item in node for reference in references(item)]
    if not isinstance(node, dict):
        return []
    own_references = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
    return own_references + [reference for item in node.values() for reference in references(item)]


async def test_openapi_document_is_served_unchanged(client: ApiClient) -> None:
    served = (await client("GET", "/openapi.json")).json()
    assert served == openapi_document(OPERATIONS) and served["openapi"] == "3.1.0"


def test_openapi_references_resolve_and_schemas_are_valid() -> None:
    spec = openapi_document(OPERATIONS)
    schemas = spec["components"]["schemas"]
    assert {reference.removeprefix("#/components/schemas/") for reference in references(spec)} <= set(schemas)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)


def test_operation_ids_are_unique_and_paths_declared() -> None:
    operations = [
        (path, operation)
        for path, methods in openapi_document(OPERATIONS)["paths"].items()
        for operation in methods.values()
    ]
    names = [operation["operationId"] for _, operation in operations]
    assert len(set(names)) == len(names)
    for path, operation in operations:
        declared = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path))


def integers(node: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every schema of an integer, with its path."""
    if isinstance(node, list):
        return [found for index, item in enumerate(node) for found in integers(item, f"{path}/{index}")]
    if not isinstance(node, dict):
        return []
    own = [(path, node)] if node.get("type") == "integer" else []
    return own + [found for key, item in node.items() for found in integers(item, f"{path}/{key}")]


def test_every_integer_in_openapi_has_bounds() -> None:
    found = integers(openapi_document(OPERATIONS))
    assert len(found) > 10
    assert [path for path, schema in found if not {"minimum", "maximum"} <= schema.keys()] == []


def test_openapi_fields_have_descriptions() -> None:
    schemas = openapi_document(OPERATIONS)["components"]["schemas"]
    assert "Unix time" in schemas["SessionResponse"]["properties"]["expires_at"]["description"]
    assert schemas["SessionRequest"]["additionalProperties"] is False


async def test_docs_page_loads_nothing_from_other_hosts(client: ApiClient) -> None:
    answer = await client("GET", "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]", answer.text)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])


@pytest.mark.parametrize("word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="])
def test_docs_page_never_interprets_text_as_markup(word: str) -> None:
    page, _ = _docs_page()
    assert word not in page.decode()


def test_docs_page_supports_dark_mode_and_narrow_screens() -> None:
    page = _docs_page()[0].decode()
    assert "color-scheme: light dark" in page and "width=device-width" in page and "overflow-wrap" in page
