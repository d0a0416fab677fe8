"""Streamed answers: events come while the policy writes, and together they are the whole answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from gateway.types import Image, ToolCall
from mtrl_plugins.agents import turn_stream
from mtrl_plugins.agents.reply_stream import ReplyStream
from tests.plugins.agents.agent_harness import ADD, CALL, USER, AgentHarness, Requests, open_agents, read_events
from tests.waiting import PATIENCE_S
from trainer.engine.base import EngineError, Generation, OnIds, Sampling
from trainer.engine.scripted import ScriptedEngine
from trainer.parse.hermes import Hermes
from trainer.parse.plain import PlainText
from trainer.rollout.rollout import StopReason

TURN = f"<think>\nSum them: 3 < 4 🎈\n</think>\n\nI add « them » with <tool_x>. 🎈🎈\n{CALL}"
CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"
PATHS = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
ANTHROPIC_ADD = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": [ADD]},
    RESPONSES: {"input": [USER], "tools": [{"type": "function", **ADD["function"]}]},
    MESSAGES: {"messages": [USER], "tools": [ANTHROPIC_ADD], "max_tokens": 400},
}


class GatedEngine:
    """A scripted engine that stops after some ids, until it is released; then it may fail."""

    def __init__(self, inner: ScriptedEngine, count: int, *, fails: bool = False) -> None:
        self.inner, self.count, self.fails = inner, count, fails
        self.reached, self.released, self.cancelled = anyio.Event(), anyio.Event(), anyio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: str = "",
        group: str = "",
        images: Sequence[Image] = (),
        on_ids: OnIds | None = None,
    ) -> Generation:
        generation = await self.inner.generate(ids, sampling, key=key, group=group, images=images)
        assert on_ids is not None
        if self.count:
            on_ids(generation.ids[: self.count])
        self.reached.set()
        try:
            await self.released.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.set()
            raise
        if self.fails:
            raise EngineError("out of memory")
        on_ids(generation.ids[self.count :])
        return generation


@asynccontextmanager
async def gated(
    count: int, *, turn: str = TURN, fails: bool = False
) -> AsyncIterator[tuple[AgentHarness, Requests, GatedEngine]]:
    async with open_agents([turn]) as harness:
        engine = GatedEngine(harness.engine, count, fails=fails)
        object.__setattr__(harness.runner, "engine", engine)
        async with harness.session() as agent:
            yield harness, agent, engine


def join(events: Sequence[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Content, reasoning and calls that the deltas of any protocol make."""
    content, reasoning, calls = "", "", {}
    for event in events:
        delta = event["choices"][0]["delta"] if event.get("choices") else event.get("delta", {})
        kind = event.get("type")
        if kind == "response.output_text.delta":
            content += delta
        elif kind == "response.reasoning_text.delta":
            reasoning += delta
        elif kind == "response.function_call_arguments.done":
            calls[event["item_id"]] = (calls[event["item_id"]], event["name"], event["arguments"])
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            calls[event["item"]["id"]] = event["item"]["call_id"]
        elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = (event["content_block"]["id"], event["content_block"]["name"], "")
        elif isinstance(delta, dict):
            content += delta.get("content") or delta.get("text", "")
            reasoning += delta.get("reasoning_content") or delta.get("thinking", "")
            if "partial_json" in delta:
                id, name, text = calls[event["index"]]
                calls[event["index"]] = (id, name, text + delta["partial_json"])
            for call in delta.get("tool_calls", ()):
                calls[call["index"]] = (call["id"], call["function"]["name"], call["function"]["arguments"])
    return content, reasoning, list(calls.values())


@PATHS
@pytest.mark.parametrize("count", [1, 30])
async def test_deltas_make_the_whole_answer(path: str, count: int) -> None:
    async with gated(count) as (_, agent, engine):
        engine.released.set()
        response = await agent.post(path, BODIES[path] | {"stream": True})
        turn = agent.session.tree.turns[0]
        content, reasoning, calls = join(read_events(response.text))
        assert (content, reasoning) == (turn.message["content"], turn.message["reasoning_content"])
        assert content == "I add « them » with <tool_x>. 🎈🎈" and reasoning == "Sum them: 3 < 4 🎈"
        ((id, name, arguments),) = calls
        assert (id, name) == (turn.entry.calls[0].id, "add")
        assert json.loads(arguments) == {"a": 3, "b": 4}
        assert path == MESSAGES or arguments == turn.entry.calls[0].arguments


@PATHS
async def test_first_part_comes_before_the_policy_is_done(path: str) -> None:
    async with gated(100, turn=TURN) as (_, agent, engine):
        headers = {"Authorization": f"Bearer {agent.session.api_key}"}
        body = BODIES[path] | {"stream": True}
        async with agent.client.stream("POST", path, json=body, headers=headers) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if "Sum them" in text:
                    engine.released.set()
            assert engine.released.is_set() and "I add" in text
        assert response.headers["content-type"].startswith("text/event-stream")


@PATHS
async def test_engine_that_fails_in_mid_stream_gives_an_error_event(path: str) -> None:
    async with gated(100, fails=True) as (_, agent, engine):
        engine.released.set()
        response = await agent.post(path, BODIES[path] | {"stream": True})
        assert response.status_code == 200
        last = read_events(response.text)[-1]
        error = last["response"]["error"] if path == RESPONSES else last["error"]
        assert error["message"] == "the engine failed"
        assert path != RESPONSES or last["type"] == "response.failed"
        assert path != MESSAGES or (last["type"], error["type"]) == ("error", "api_error")
        assert agent.session.stop == (StopReason.ENGINE_FAILED, "out of memory")


@PATHS
async def test_engine_that_fails_before_the_first_token_gives_a_status(path: str) -> None:
    async with gated(0, fails=True) as (_, agent, engine):
        engine.released.set()
        response = await agent.post(path, BODIES[path] | {"stream": True})
        assert response.status_code == 503 and "the engine failed" in response.text


@PATHS
async def test_client_that_hangs_up_in_mid_stream_ends_the_generation(path: str) -> None:
    async with gated(100) as (_, agent, engine):
        headers = {"Authorization": f"Bearer {agent.session.api_key}"}
        body = BODIES[path] | {"stream": True}
        async with agent.client.stream("POST", path, json=body, headers=headers) as response:
            async for _piece in response.aiter_text():
                break
        with anyio.fail_after(PATIENCE_S):
            await engine.cancelled.wait()
        assert agent.session.tree.turns == []
        while not agent.session.counts:
            await anyio.lowlevel.checkpoint()
        assert agent.session.counts == {"hung_up": 1}


async def test_comments_keep_a_waiting_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_stream, "KEEP_ALIVE_S", 0.01)
    async with gated(0) as (_, agent, engine):
        headers = {"Authorization": f"Bearer {agent.session.api_key}"}
        body = BODIES[CHAT] | {"stream": True}
        async with agent.client.stream("POST", CHAT, json=body, headers=headers) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                engine.released.set()
        assert text.startswith(": keep-alive\n\n") and text.endswith("data: [DONE]\n\n")
        assert join(read_events(text))[0] == agent.session.tree.turns[0].message["content"]


async def test_stop_string_is_never_sent() -> None:
    async with open_agents(["one ST STOP" + " two" * 200]) as harness, harness.session() as agent:
        body = {"messages": [USER], "stop": "STOP", "stream": True, "max_tokens": 60}
        response = await agent.post(CHAT, body)
        assert join(read_events(response.text))[0] == "one ST "
        assert agent.session.tree.turns[0].message["content"] == "one ST "


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_lone_closing_tag_does_not_take_back_what_was_sent(path: str) -> None:
    async with open_agents(["I think so.</think>Yes.", "Go."]) as harness, harness.session() as agent:
        response = await agent.post(path, BODIES[path] | {"stream": True})
        content, _, _ = join(read_events(response.text))
        message = agent.session.tree.turns[0].message
        assert content == message["content"] and content.startswith("I think so.")
        await agent.chat([USER, {"role": "assistant", "content": content}, USER], tools=[ADD])
        assert len(agent.session.tree.ledgers()) == 1 and agent.session.tree.changed == {}


async def test_streamed_logprobs_come_with_the_last_chunk() -> None:
    async with open_agents(["It is 7."]) as harness, harness.session() as agent:
        response = await agent.post(CHAT, {"messages": [USER], "stream": True, "logprobs": True})
        rows = [event["choices"][0]["logprobs"] for event in read_events(response.text)]
        assert len(rows[-1]["content"]) == len(agent.session.tree.turns[0].entry.ids)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_text_is_known_as_it_comes_and_marks_never_are(size: int) -> None:
    call = Hermes().render([ToolCall("", "add", "{}")])
    text = f"<think>\nSum them.\n</think>\n\nI add: a < b. \n{call}"
    stream, seen = ReplyStream(Hermes()), []
    for start in range(0, len(text), size):
        stream.feed(text[start : start + size])
        seen.append(stream.content)
    assert (stream.reasoning, stream.content) == ("Sum them.", "I add: a < b.")
    assert size > 3 or len(set(seen)) > 4


def test_everything_that_can_become_a_mark_is_held_back() -> None:
    stream = ReplyStream(Hermes())
    for text, known in (("a <tool", "a"), ("_cal", "a"), ("m> b ", "a <tool_calm> b"), ("<", "a <tool_calm> b")):
        stream.feed(text)
        assert stream.content == known


def test_parser_of_a_user_and_a_plain_turn() -> None:
    class Own(Hermes):
        def parse(self, text):  # type: ignore[no-untyped-def]
            return super().parse(text.upper())

    own, plain = ReplyStream(Own()), ReplyStream(PlainText())
    for stream in (own, plain):
        stream.feed("so ")
    assert (own.content, plain.content) == ("", "so ")
