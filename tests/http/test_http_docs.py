"""/openapi.json is complete and valid."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs

from gateway.http.app import OPERATIONS
from gateway.http.openapi import openapi_document


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
    operations = [(path, each) for path, methods in spec["paths"].items() for each in methods.values()]
    assert len({each["operationId"] for _, each in operations}) == len(operations)
    for path, each in operations:
        assert [one["name"] for one in each["parameters"] if one["in"] == "path"] == re.findall(r"{(\w+)}", path)
