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
