"""Tools listed, calls in, tool messages out: ids, order and layouts."""

from __future__ import annotations

import base64
import json

from tests.http.api_client import ApiClient, tool_call
from tests.live_server import LiveServer
from tests.toolset_conformance.sample_tools import PNG

PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}}


async def test_tool_messages_keep_the_order_and_ids_of_the_calls(client: ApiClient) -> None:
    id = await client.begin()
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [tool_call("add", json.dumps({"a": place}), f"call_{place}") for place in range(5)],
    }
    response = (await client("POST", f"/v1/sessions/{id}/calls", message)).json()
    assert response["messages"] == [
        {"role": "tool", "tool_call_id": f"call_{place}", "content": str(place)} for place in range(5)
    ]
    assert [item["tool_call_id"] for item in response["results"]] == [f"call_{place}" for place in range(5)]
    assert all(item["elapsed_s"] > 0 for item in response["results"])


async def test_media_become_content_parts_in_order(client: ApiClient) -> None:
    id = await client.begin()
    content = (await client.call(id, "several"))["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text", "input_audio", *["text"] * 4]
    assert content[1] == PICTURE
    assert content[3]["input_audio"]["format"] == "wav"
    assert content[4]["text"] == "file:///notes.txt:\na note"
    assert content[5]["text"] == "[resource file:///blob.bin (2 bytes): application/octet-stream]"
    assert content[6]["text"] == "[resource https://example.org/far: far, only pointed at]"


async def test_strict_layout_puts_media_in_a_user_message_at_the_end(client: ApiClient) -> None:
    id = await client.begin()
    body = {"tool_calls": [tool_call("several", id="one"), tool_call("add", '{"a": 1}', "two")], "layout": "strict"}
    response = (await client("POST", f"/v1/sessions/{id}/calls", body)).json()["messages"]
    assert [message["role"] for message in response] == ["tool", "tool", "user"]
    assert isinstance(response[0]["content"], str) and "[image: see" in response[0]["content"]
    assert "under tool call one" in response[0]["content"]
    assert response[1]["content"] == "1"
    content = response[2]["content"]
    assert content[0] == {"type": "text", "text": "From tool call one:"}
    assert [part["type"] for part in content[1:]] == ["image_url", "input_audio"]


async def test_strict_session_removes_nulls_of_optional_arguments(client: ApiClient) -> None:
    arguments = '{"colour": "red", "shade": null, "size": null}'
    strict, loose = await client.begin(strict=True), await client.begin()
    assert (await client.call(strict, "pick", arguments))["messages"][0]["content"] == "red None 1"
    assert (await client.call(loose, "pick", arguments))["results"][0]["outcome"] == "invalid"
    broken = await client.call(strict, "pick", '{"colour": null')
    assert broken["results"][0]["outcome"] == "invalid"


async def test_loop_tool_is_only_callable_by_the_loop(client: ApiClient) -> None:
    id = await client.begin(feedback="scripted")
    arguments = {"messages": [{"role": "assistant", "content": "hm"}]}
    assert (await client.call(id, "feedback_scripted", arguments))["results"][0]["outcome"] == "invalid"
    feedback = await client.call(id, "feedback_scripted", arguments, audience="loop")
    assert feedback["messages"][0]["content"] == "go on"


async def test_pure_tools_are_called_without_a_session(client: ApiClient, server: LiveServer) -> None:
    before = len(server.gateway.sessions)
    answer = await client("POST", "/v1/calls", {"tool_calls": [tool_call("pure_add", '{"a": 1, "b": 2}')]})
    assert answer.json()["messages"][0]["content"] == "3"
    assert len(server.gateway.sessions) == before
    for name in ("remember", "nothing", "feedback_gsm8k"):
        refused = await client("POST", "/v1/calls", {"tool_calls": [tool_call("pure_add"), tool_call(name)]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "tool_calls.1.function.name")


async def test_invalid_body_is_refused_with_the_field(client: ApiClient) -> None:
    id = await client.begin()
    for body, where in (
        ({}, "tool_calls"),
        ({"tool_calls": [{}]}, "tool_calls.0.function"),
        ({"tool_calls": [tool_call("add", 7)]}, "tool_calls.0.function.arguments.str"),
        ({"tool_calls": [tool_call("add") | {"type": "custom"}]}, "tool_calls.0.type"),
        ({"messages": [{}, {"tool_calls": [{"function": {}}]}]}, "messages.1.tool_calls.0.function.name"),
        ({"tool_calls": [], "layout": "pretty"}, "layout"),
        ({"tool_calls": [tool_call("add")] * 1025}, "tool_calls"),
        ({"messages": [{"tool_calls": [tool_call("add")] * 600}] * 2}, "messages"),
    ):
        answer = await client("POST", f"/v1/sessions/{id}/calls", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, where)


async def test_tool_list_has_strict_schemas_where_possible(client: ApiClient) -> None:
    listed = (await client("GET", "/v1/tools?strict=true")).json()["data"]
    functions = {tool["function"]["name"]: tool["function"] for tool in listed}
    assert functions["pick"]["strict"] is True
    assert functions["pick"]["parameters"]["required"] == ["colour", "shade", "size"]
    assert functions["pick"]["parameters"]["additionalProperties"] is False
    assert functions["free"]["strict"] is False
    assert functions["free"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": True}
