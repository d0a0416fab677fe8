"""Calls in, tool messages out: ids, order, layouts, and what becomes of a call whose caller leaves."""

from __future__ import annotations

import base64
import json

import anyio
import pytest

from tests.doors.kit import PNG
from tests.http.rooms import Caller, Watched, tool_call
from tests.served import Served, until

PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}}


async def test_an_assistant_message_is_answered_in_order_with_its_ids(ask: Caller) -> None:
    id = await ask.begin()
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [tool_call("add", json.dumps({"a": place}), f"call_{place}") for place in range(5)],
    }
    said = (await ask("POST", f"/v1/sessions/{id}/calls", message)).json()
    assert said["messages"] == [
        {"role": "tool", "tool_call_id": f"call_{place}", "content": str(place)} for place in range(5)
    ]
    assert [one["tool_call_id"] for one in said["results"]] == [f"call_{place}" for place in range(5)]


async def test_machine_fields_stand_beside_the_messages(ask: Caller) -> None:
    id = await ask.begin()
    (result,) = (await ask.call(id, "facts"))["results"]
    assert result.pop("elapsed_s") > 0
    assert result.pop("timing").keys() <= {"queue"}, "a machine that is busy lets calls wait for a moment"
    assert result == {
        "tool_call_id": "c1",
        "name": "facts",
        "outcome": "ok",
        "reward": 0.5,
        "done": True,
        "attempts": 1,
        "structured": {"deep": [1, None, {"ä": 2.5}]},
        "metrics": {"tokens": 7},
        "reason": "because",
        "meta": {"trace": "kept"},
    }


@pytest.mark.parametrize("wrap", [lambda calls: calls, lambda calls: {"messages": [{"tool_calls": calls}, {}]}])
async def test_calls_may_come_bare_or_in_several_messages(ask: Caller, wrap: object) -> None:
    id = await ask.begin()
    body = wrap([tool_call("add", '{"a": 1}', "x"), tool_call("add", '{"a": 2}', "y")])  # type: ignore[operator]
    said = (await ask("POST", f"/v1/sessions/{id}/calls", body)).json()
    assert [one["content"] for one in said["messages"]] == ["1", "2"]


async def test_arguments_may_be_an_object(ask: Caller) -> None:
    id = await ask.begin()
    assert (await ask.call(id, "add", {"a": 1, "b": 2}))["messages"][0]["content"] == "3"


async def test_media_are_content_parts_in_their_order(ask: Caller) -> None:
    id = await ask.begin()
    content = (await ask.call(id, "several"))["messages"][0]["content"]
    assert [part["type"] for part in content] == [
        *("text", "image_url", "text", "input_audio"),
        *("text", "text", "text", "text"),
    ]
    assert content[1] == PICTURE
    assert content[3]["input_audio"]["format"] == "wav"
    assert content[4]["text"] == "file:///notes.txt:\na note"
    assert content[5]["text"] == "[resource file:///blob.bin (2 bytes): application/octet-stream]"
    assert content[6]["text"] == "[resource https://example.org/far: far, only pointed at]"


async def test_the_strict_layout_shows_media_after_all_tool_messages(ask: Caller) -> None:
    id = await ask.begin()
    body = {"tool_calls": [tool_call("several", id="one"), tool_call("add", '{"a": 1}', "two")], "layout": "strict"}
    said = (await ask("POST", f"/v1/sessions/{id}/calls", body)).json()["messages"]
    assert [message["role"] for message in said] == ["tool", "tool", "user"]
    assert isinstance(said[0]["content"], str) and "[image: see" in said[0]["content"]
    assert "under tool call one" in said[0]["content"]
    assert said[1]["content"] == "1"
    shown = said[2]["content"]
    assert shown[0] == {"type": "text", "text": "From tool call one:"}
    assert [part["type"] for part in shown[1:]] == ["image_url", "input_audio"]


async def test_the_strict_layout_of_text_alone_is_text_alone(ask: Caller) -> None:
    id = await ask.begin()
    said = await ask.call(id, "add", '{"a": 1}', layout="strict")
    assert said["messages"] == [{"role": "tool", "tool_call_id": "c1", "content": "1"}]


async def test_strict_sessions_take_back_the_nulls_that_strict_rules_force(ask: Caller) -> None:
    arguments = '{"colour": "red", "shade": null, "size": null}'
    strict, loose = await ask.begin(strict=True), await ask.begin()
    assert (await ask.call(strict, "pick", arguments))["messages"][0]["content"] == "red None 1"
    assert (await ask.call(loose, "pick", arguments))["results"][0]["outcome"] == "invalid"
    broken = await ask.call(strict, "pick", '{"colour": null')
    assert broken["results"][0]["outcome"] == "invalid"


async def test_a_message_without_calls_is_answered_with_none(ask: Caller) -> None:
    id = await ask.begin()
    for message in ({"role": "assistant", "content": "hm", "tool_calls": None}, {"messages": []}, []):
        answer = await ask("POST", f"/v1/sessions/{id}/calls", message)
        assert answer.json() == {"messages": [], "results": []}


async def test_a_mistake_of_the_policy_is_a_message_to_it(ask: Caller) -> None:
    id = await ask.begin()
    said = await ask.call(id, "add", '{"a": "one"}')
    assert said["results"][0]["outcome"] == "invalid"
    assert "Expected: {a: integer" in said["messages"][0]["content"]


async def test_a_tool_for_the_loop_needs_the_loop_to_call_it(ask: Caller) -> None:
    id = await ask.begin(feedback="scripted")
    arguments = {"messages": [{"role": "assistant", "content": "hm"}]}
    assert (await ask.call(id, "feedback_scripted", arguments))["results"][0]["outcome"] == "invalid"
    heard = await ask.call(id, "feedback_scripted", arguments, audience="loop")
    assert heard["messages"][0]["content"] == "go on"


async def test_pure_tools_need_no_session(ask: Caller, at: Served) -> None:
    before = len(at.gateway.sessions)
    answer = await ask("POST", "/v1/calls", {"tool_calls": [tool_call("pure_add", '{"a": 1, "b": 2}')]})
    assert answer.json()["messages"][0]["content"] == "3"
    assert len(at.gateway.sessions) == before


async def test_other_tools_are_told_to_open_a_session(ask: Caller) -> None:
    for name in ("remember", "nothing", "feedback_gsm8k"):
        answer = await ask("POST", "/v1/calls", {"tool_calls": [tool_call("pure_add"), tool_call(name)]})
        error = answer.json()["error"]
        assert answer.status_code == 409 and error["param"] == "tool_calls.1.function.name"
        assert "POST /v1/sessions" in error["remedy"]


async def test_hanging_up_cancels_the_call_and_leaves_the_session(ask: Caller, at: Served, watched: Watched) -> None:
    id = await ask.begin()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask.call, id, "hang")
        await until(watched.started.is_set)
        tasks.cancel_scope.cancel()
    await until(watched.cancelled.is_set)
    assert (await ask.call(id, "add", '{"a": 1}'))["messages"][0]["content"] == "1"


async def test_wrong_shapes_are_refused_with_the_field_that_is_wrong(ask: Caller) -> None:
    id = await ask.begin()
    for body, where in (
        ({}, "tool_calls"),
        ({"tool_calls": {}}, "tool_calls"),
        ({"tool_calls": [{}]}, "tool_calls.0.function"),
        ({"tool_calls": [tool_call("add", 7)]}, "tool_calls.0.function.arguments.str"),
        ({"tool_calls": [tool_call("add") | {"type": "custom"}]}, "tool_calls.0.type"),
        ({"messages": [{}, {"tool_calls": [{"function": {}}]}]}, "messages.1.tool_calls.0.function.name"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"tool_calls": [], "layout": "pretty"}, "layout"),
        ({"tool_calls": [tool_call("add")] * 1025}, "tool_calls"),
        ({"messages": [{"tool_calls": [tool_call("add")] * 600}] * 2}, "messages"),
    ):
        answer = await ask("POST", f"/v1/sessions/{id}/calls", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, where)
