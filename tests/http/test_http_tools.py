"""Tests of GET /v1/tools."""

from __future__ import annotations

from gateway.gateway import Gateway
from gateway.wire import spec_from_json
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import LiveServer


def names(listed: dict[str, object]) -> list[str]:
    return [tool["function"]["name"] for tool in listed["data"]]  # type: ignore[attr-defined]


async def test_tool_list_contains_the_policys_tools(client: ApiClient) -> None:
    listed = (await client("GET", "/v1/tools")).json()
    assert listed["object"] == "list"
    assert "add" in names(listed) and "feedback_gsm8k" not in names(listed)
    add = listed["data"][0]
    assert add["type"] == "function" and add["function"]["description"] == "Adds two numbers."
    assert add["function"]["parameters"]["required"] == ["a"] and "strict" not in add["function"]


async def test_tool_list_can_be_filtered_by_audience(client: ApiClient) -> None:
    loop = (await client("GET", "/v1/tools?audience=loop")).json()
    everyone = (await client("GET", "/v1/tools?audience=all")).json()
    assert names(loop) == ["feedback_gsm8k", "feedback_scripted"]
    assert set(names(everyone)) > {"add", "feedback_gsm8k"}


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


async def test_invalid_query_parameter_is_named(client: ApiClient) -> None:
    answer = await client("GET", "/v1/tools?audience=everyone")
    assert answer.status_code == 422
    assert answer.json()["error"] == {
        "type": "invalid_request",
        "message": "audience has an unknown value.",
        "remedy": "Use one of: policy, loop, all.",
        "param": "audience",
    }


async def test_tool_names_are_safe_for_a_chat_api() -> None:
    async with Gateway(http_sources()) as gateway:
        assert all(len(spec.name) <= 64 and spec.name.replace("_", "a").isalnum() for spec in gateway.specs)
