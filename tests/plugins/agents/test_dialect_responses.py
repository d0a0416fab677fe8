"""The protocol of Responses: items read and written, the order of events, free-text tools and earlier answers."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import pytest

from mtrl_plugins.agents.requests import MessageCache, PolicyProblem
from mtrl_plugins.agents.responses_dialect import read_request
from tests.plugins.agents.agent_harness import CALL, TEMPLATE, call_text, open_agents, read_events
from tests.sample_images import png
from trainer.ledger import Message

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "grammar", "syntax": "lark"}}
SEARCH = {"type": "web_search", "search_context_size": "low"}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def call(id: str, name: str = "add", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def output(id: str, text: Any = "7") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def read(*items: dict[str, Any], **body: Any) -> tuple[Message, ...]:
    return read_request({"input": list(items), **body}, MessageCache()).messages


def roles(messages: Sequence[Message]) -> list[str]:
    return [message["role"] for message in messages]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    messages = read(user("hi"), thought("Sum them."), said("I add."), call("1"), call("2"), output("1"), output("2"))
    assert roles(messages) == ["user", "assistant", "tool", "tool"]
    turn = messages[1]
    assert (turn["content"], turn["reasoning_content"]) == ("I add.", "Sum them.")
    assert [item["id"] for item in turn["tool_calls"]] == ["1", "2"]


def test_turns_without_an_answer_between_them_are_separate() -> None:
    messages = read(user("hi"), said("One."), said("Two."), thought("x"), said("Three."))
    assert [message["content"] for message in messages] == ["hi", "One.", "Two.", "Three."]


def test_text_input_instructions_and_developer_messages_are_read() -> None:
    request = read_request({"input": "hi", "instructions": "Be short."}, MessageCache())
    assert [(message["role"], message["content"]) for message in request.messages] == [
        ("system", "Be short."),
        ("user", "hi"),
    ]
    assert roles(read({"role": "developer", "content": "x"}, user("hi"))) == ["system", "user"]


def test_free_text_of_custom_tools_is_an_argument_and_comes_back() -> None:
    item = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": '*** "quoted"\n'}
    answer = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    turn = read(user("hi"), item, answer)[1]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": '*** "quoted"\n'}
    (tool,) = read_request({"input": "hi", "tools": [PATCH]}, MessageCache()).tools
    assert list(tool["function"]["parameters"]["properties"]) == ["input"]


def test_images_are_read_from_messages_and_from_outputs_of_tools() -> None:
    uri = f"data:image/png;base64,{b64encode(png()).decode()}"
    image = {"type": "input_image", "image_url": uri}
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What?"}, image]}
    messages = read(question, call("1"), output("1", [image]))
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image"]
    assert messages[2]["content"][0]["image"].data == png()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
        ({"input": [call("1") | {"arguments": {}}]}, "input.0.arguments"),
        ({"input": [call("1") | {"name": None}]}, "input.0"),
        ({"input": "x", "tools": [{"name": "add"}]}, "tools.0"),
        ({"input": "x", "text": {"format": "json_schema"}}, "format"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "tool_choice": 3}, "tool_choice"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, None),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_field(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(PolicyProblem) as caught:
        read_request(body, MessageCache())
    assert param is None or caught.value.param == param
    assert caught.value.kind in ("invalid_request", "unsupported")


async def test_events_of_reasoning_text_and_a_call_come_in_the_protocols_order() -> None:
    turn = f"<think>Sum them.</think>I add.\n{CALL}"
    async with open_agents([turn]) as harness, harness.session() as agent:
        response = await agent.post("/responses", {"input": "3 + 4?", "tools": [ADD], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = read_events(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    item_kinds = [kind for kind in kinds if kind.startswith("output_item")]
    assert item_kinds == ["output_item.added", "output_item.done"] * 3
    for done in ("reasoning_text.done", "output_text.done", "function_call_arguments.done"):
        assert kinds.index(done.replace("done", "delta")) < kinds.index(done)
    assert kinds.index("content_part.added") < kinds.index("output_text.delta") < kinds.index("content_part.done")
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    final = events[-1]["response"]
    assert final["output"] == items and final["status"] == "completed" and final["usage"]["output_tokens"] > 0
    for name, kind in (("text", "output_text"), ("arguments", "function_call_arguments")):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        (done,) = [event[name] for event in events if event["type"] == f"response.{kind}.done"]
        assert "".join(deltas) == done


async def test_turn_that_is_cut_is_incomplete() -> None:
    async with open_agents(["It is seven, I would say."]) as harness, harness.session() as agent:
        body = {"input": "3 + 4?", "max_output_tokens": 3, "stream": True}
        last = read_events((await agent.post("/responses", body)).text)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("order", ["calls first", "each with its output"])
async def test_interleaved_calls_and_outputs_of_one_turn_go_on_from_its_ids(order: str) -> None:
    async with open_agents([f"{CALL}\n{CALL}", "It is 7."]) as harness, harness.session() as agent:
        body = {"tools": [ADD]}
        one, two = (await agent.post("/responses", {**body, "input": "3 + 4?"})).json()["output"]
        items = [one, two, output(two["call_id"], "second"), output(one["call_id"], "first")]
        if order == "each with its output":
            items = [one, output(one["call_id"], "first"), two, output(two["call_id"], "second")]
        assert (await agent.post("/responses", {**body, "input": [user("3 + 4?"), *items]})).status_code == 200
        (ledger,) = agent.session.tree.ledgers()
        assert len(ledger.turns) == 2 and agent.session.tree.changed == {}


def test_calls_of_further_turns_are_not_joined() -> None:
    items = [call("call_0_0_a"), output("call_0_0_a"), call("call_1_0_a"), output("call_1_0_a"), call("x"), call("y")]
    assert roles(read(user("hi"), *items)) == ["user", *("assistant", "tool") * 2, "assistant"]


async def test_custom_tool_gets_its_free_text_and_its_call_goes_on_from_the_ids() -> None:
    patch = call_text("patch", json.dumps({"input": "*** Begin"}))
    async with open_agents([patch, "Done."]) as harness, harness.session() as agent:
        body = {"tools": [PATCH]}
        (item,) = (await agent.post("/responses", {**body, "input": "edit"})).json()["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin")
        answer = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
        await agent.post("/responses", {**body, "input": [user("edit"), item, answer]})
        (ledger,) = agent.session.tree.ledgers()
        assert len(ledger.turns) == 2 and agent.session.tree.changed == {}


@pytest.mark.parametrize("arguments", ['"three"', '{"text": "no input"}', '{"input": 3}'])
async def test_unreadable_arguments_of_a_custom_tool_are_given_as_they_are_and_keep_their_ids(arguments: str) -> None:
    async with open_agents([call_text("patch", arguments), "Done."]) as harness, harness.session() as agent:
        body = {"tools": [PATCH]}
        (item,) = (await agent.post("/responses", {**body, "input": "edit"})).json()["output"]
        assert item["input"] == arguments
        answer = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "no"}
        assert (await agent.post("/responses", {**body, "input": [user("edit"), item, answer]})).status_code == 200
        assert len(agent.session.tree.turns) == 2


async def test_hosted_tools_are_left_out_and_counted_and_invented_kinds_do_not_fill_the_counts() -> None:
    async with open_agents(["yes"]) as harness, harness.session() as agent:
        tools = [{"type": f"kind_{number}"} for number in range(500)]
        await agent.post("/responses", {"input": "hi", "tools": [ADD, SEARCH, *tools]})
        assert len(agent.session.counts) <= 51 and sum(agent.session.counts.values()) == 501
        assert agent.session.counts["left_out_web_search"] == 1
        prompt = TEMPLATE.tokenizer.decode(harness.engine.requests[0].ids)
        assert "add" in prompt and "web_search" not in prompt
