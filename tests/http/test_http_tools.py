"""Tests of GET /v1/tools."""

from __future__ import annotations

from tests.http.api_client import ApiClient


async def test_tool_list_has_strict_schemas_where_possible(client: ApiClient) -> None:
    listed = (await client("GET", "/v1/tools?strict=true")).json()["data"]
    functions = {tool["function"]["name"]: tool["function"] for tool in listed}
    assert functions["pick"]["strict"] is True
    assert functions["pick"]["parameters"]["required"] == ["colour", "shade", "size"]
    assert functions["pick"]["parameters"]["additionalProperties"] is False
    assert functions["free"]["strict"] is False
    assert functions["free"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": True}
