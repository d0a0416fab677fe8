"""The protocol of Anthropic's Messages: blocks read and written, the order of events, thinking, images and tools."""

from __future__ import annotations

from base64 import b64encode
from itertools import groupby
from typing import Any

import pytest

from mtrl_plugins.agents.anthropic_dialect import UNREADABLE, read_request
from mtrl_plugins.agents.requests import MessageCache, PolicyProblem
from mtrl_plugins.agents.turn_tree import Change
from tests.plugins.agents.agent_harness import CALL, TEMPLATE, USER, call_text, open_agents, read_events
from tests.sample_images import png

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def result(id: str, content: Any = "7", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def read(*messages: Any, **body: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in read_request({"messages": list(messages), **body}, MessageCache()).messages]


def test_blocks_of_a_turn_are_one_message_and_results_are_messages_before_the_text() -> None:
    turn = [
        {"type": "thinking", "thinking": "Sum them.", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 3}},
    ]
    answers = [result("1"), {"type": "text", "text": "Go on."}]
    messages = read(USER, {"role": "assistant", "content": turn}, {"role": "user", "content": answers})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("I add.", "Sum them.")
    assert messages[1]["tool_calls"][0]["function"]["name"] == "add" and messages[2]["tool_call_id"] == "1"


def test_system_as_blocks_is_one_text_and_cache_marks_do_not_matter() -> None:
    blocks = [
        {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Two."},
    ]
    assert read(USER, system=blocks)[0] == {"role": "system", "content": "One.\nTwo."}


def test_images_are_read_from_messages_and_from_results() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(png()).decode()}
    image = {"type": "image", "source": source}
    question = {"role": "user", "content": [{"type": "text", "text": "What?"}, image]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}
    messages = read(question, use, {"role": "user", "content": [result("1", [image])]})
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image"]
    assert messages[2]["content"][0]["image"].data == png()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages.0"),
        ({"messages": [USER], "tools": [{"input_schema": {}}]}, "tools.0"),
        ({"messages": [USER], "tool_choice": "auto"}, "tool_choice"),
        ({"messages": [USER], "top_k": 5}, "top_k"),
        ({"messages": [USER], "max_tokens": "many"}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
         "messages.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PolicyProblem) as caught:
        read_request(body, MessageCache())
    assert caught.value.param == param and caught.value.kind in ("invalid_request", "unsupported")


async def test_events_of_thinking_text_and_a_call_come_in_the_protocols_order() -> None:
    turn = f"<think>Sum them.</think>I add.\n{CALL}"
    async with open_agents([turn]) as harness, harness.session() as agent:
        body = {"messages": [USER], "tools": [ADD], "max_tokens": 200, "stream": True}
        events = read_events((await agent.post("/messages", body)).text)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    ends = ["message_delta", "message_stop"]
    assert [kind for kind, _ in groupby(kinds)] == ["message_start", *block, *block, *block, *ends]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    }
    assert starts[2]["content_block"]["input"] == {}
    last = next(event for event in events if event["type"] == "message_delta")
    assert last["delta"]["stop_reason"] == "tool_use" and last["usage"]["output_tokens"] > 0
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0


async def test_blocks_that_come_back_go_on_from_the_ids() -> None:
    turn = f"<think>Sum them.</think>I add.\n{CALL}"
    async with open_agents([turn, "It is 7."]) as harness, harness.session() as agent:
        body: dict[str, Any] = {"tools": [ADD], "max_tokens": 200}
        first = (await agent.post("/messages", {**body, "messages": [USER]})).json()
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        assert first["content"][2]["input"] == {"a": 3, "b": 4} and first["stop_reason"] == "tool_use"
        said = {"role": "assistant", "content": first["content"]}
        answer = {"role": "user", "content": [result(first["content"][2]["id"])]}
        await agent.post("/messages", {**body, "messages": [USER, said, answer]})
        (ledger,) = agent.session.tree.ledgers()
        assert len(ledger.turns) == 2 and '{"a":3,   "b": 4}' in TEMPLATE.tokenizer.decode(ledger.ids)
        assert set(agent.session.tree.changed) <= {Change.ARGUMENTS}


async def test_thinking_that_is_dropped_keeps_the_ids_and_is_counted() -> None:
    async with open_agents(["<think>Hm.</think>It is 7.", "Sure."]) as harness, harness.session() as agent:
        first = (await agent.post("/messages", {"messages": [USER], "max_tokens": 99})).json()
        said = {"role": "assistant", "content": [block for block in first["content"] if block["type"] == "text"]}
        await agent.post("/messages", {"messages": [USER, said, USER], "max_tokens": 99})
        assert len(agent.session.tree.ledgers()) == 1 and agent.session.tree.changed == {Change.REASONING: 1}


@pytest.mark.parametrize("arguments", ['"three"', "[1, 2]", "null"])
async def test_arguments_that_are_no_object_are_given_under_a_key_and_keep_their_ids(arguments: str) -> None:
    async with open_agents([call_text("add", arguments), "No."]) as harness, harness.session() as agent:
        body: dict[str, Any] = {"tools": [ADD], "max_tokens": 200}
        first = (await agent.post("/messages", {**body, "messages": [USER]})).json()
        (block,) = first["content"]
        assert block["input"] == {UNREADABLE: arguments}
        answer = {"role": "user", "content": [result(block["id"], "no", is_error=True)]}
        said = {"role": "assistant", "content": [block]}
        assert (await agent.post("/messages", {**body, "messages": [USER, said, answer]})).status_code == 200
        assert len(agent.session.tree.turns) == 2 and len(agent.session.tree.ledgers()) == 1


async def test_tools_that_run_at_the_provider_are_left_out_and_counted() -> None:
    async with open_agents(["yes"]) as harness, harness.session() as agent:
        await agent.post("/messages", {"messages": [USER], "max_tokens": 9, "tools": [ADD, SEARCH]})
        assert agent.session.counts == {"left_out_web_search_20250305": 1}
        assert "web_search" not in TEMPLATE.tokenizer.decode(harness.engine.requests[0].ids)


async def test_parallel_calls_can_be_turned_off() -> None:
    async with open_agents([f"{CALL}\n{CALL}"]) as harness, harness.session() as agent:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        body = {"messages": [USER], "max_tokens": 200, "tools": [ADD], "tool_choice": choice}
        assert len((await agent.post("/messages", body)).json()["content"]) == 1


async def test_cut_turn_and_stop_sequence_are_told() -> None:
    async with open_agents(["It is seven, I would say."]) as harness, harness.session() as agent:
        cut = (await agent.post("/messages", {"messages": [USER], "max_tokens": 3})).json()
        assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 3


async def test_errors_have_the_protocols_shape() -> None:
    async with open_agents([]) as harness, harness.session() as agent:
        wrong_key = await agent.post("/messages", {"messages": [USER]}, key="wrong")
        assert wrong_key.status_code == 404 and wrong_key.json()["error"]["type"] == "not_found_error"
        empty = await agent.post("/messages", {})
        assert empty.status_code == 400 and empty.json()["type"] == "error"
        assert empty.json()["error"]["type"] == "invalid_request_error"
