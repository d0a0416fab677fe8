"""Tests of GET /v1/tools."""

from __future__ import annotations

from gateway.gateway import Gateway
from gateway.wire import spec_from_json
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import LiveServer


async def test_tool_list_has_strict_schemas_where_possible(client: ApiClient) -> None:
    listed = (await client("GET", "/v1/tools?strict=true")).json()["data"]
    functions = {tool["function"]["name"]: tool["function"] for tool in listed}
    assert functions["pick"]["strict"] is True
    assert functions["pick"]["parameters"]["required"] == ["colour", "shade", "size"]
    assert functions["pick"]["parameters"]["additionalProperties"] is False
    assert functions["free"]["strict"] is False
    assert functions["free"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": True}


async def test_spec_form_is_lossless(client: ApiClient, server: LiveServer) -> None:
    listed = (await client("GET", "/v1/tools?form=spec&audience=all")).json()["data"]
    assert tuple(spec_from_json(value) for value in listed) == tuple(server.gateway.specs)


async def test_tool_names_are_safe_for_a_chat_api() -> None:
    async with Gateway(http_sources()) as gateway:
        assert all(len(spec.name) <= 64 and spec.name.replace("_", "a").isalnum() for spec in gateway.specs)
