"""Requests that are not served: each gets an error in its protocol's form, and the session goes on."""

from __future__ import annotations

import base64
from typing import Any

import anyio
import pytest

from tests.plugins.agents.agent_harness import ADD, USER, open_agents
from tests.sample_images import png
from trainer.rollout.settings import RolloutLimits

CHAT: dict[str, Any] = {"messages": [USER]}
RESPONSES: dict[str, Any] = {"input": "What is 3 + 4?"}
REFUSED = [
    ("/chat/completions", {}, "messages"),
    ("/chat/completions", {"messages": []}, "messages"),
    ("/chat/completions", {"messages": ["hi"]}, "messages.0"),
    ("/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ("/chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ("/chat/completions", {"messages": [USER, {"role": "assistant", "content": "It"}]}, None),
    ("/chat/completions", {**CHAT, "n": 2}, "n"),
    ("/chat/completions", {**CHAT, "tool_choice": 3, "tools": [ADD]}, "tool_choice"),
    ("/chat/completions", {**CHAT, "response_format": "json"}, "response_format"),
    ("/chat/completions", {**CHAT, "logit_bias": {"1": 5}}, "logit_bias"),
    ("/chat/completions", {**CHAT, "top_logprobs": 3}, "top_logprobs"),
    ("/chat/completions", {**CHAT, "max_tokens": -1}, "max_tokens"),
    ("/chat/completions", {**CHAT, "max_tokens": "many"}, "max_tokens"),
    ("/chat/completions", {**CHAT, "temperature": "warm"}, "temperature"),
    ("/chat/completions", {**CHAT, "stop": [1]}, "stop"),
    ("/chat/completions", {**CHAT, "tools": "add"}, "tools"),
    ("/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools.0"),
    ("/chat/completions", {**CHAT, "stream_options": 4}, "stream_options"),
    ("/chat/completions", {**CHAT, "stop": ["x"] * 17}, "stop"),
    ("/chat/completions", {**CHAT, "stop": ["x" * 201]}, "stop"),
    ("/responses", {**RESPONSES, "previous_response_id": "resp_none"}, "previous_response_id"),
    ("/responses", {**RESPONSES, "tools": [3]}, "tools.0"),
    ("/responses", {**RESPONSES, "text": 3}, "text"),
]


async def test_request_of_openai_is_refused_by_the_field() -> None:
    async with open_agents(["It is 7."]) as harness, harness.session() as agent:
        for path, body, param in REFUSED:
            response = await agent.post(path, body)
            assert response.status_code in (400, 404), (body, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
            assert error["param"] == param, body
        assert (await agent.post("/chat/completions", CHAT)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/chat/completions", {**CHAT, "tool_choice": "required", "tools": [ADD]}, 1),
        ("/chat/completions", {**CHAT, "tool_choice": {"type": "function", "function": {"name": "add"}}}, 1),
        ("/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {}}}, 1),
        ("/chat/completions", {**CHAT, "tool_choice": "auto", "response_format": {"type": "text"}}, 0),
        ("/responses", {**RESPONSES, "tool_choice": "required"}, 1),
        ("/responses", {**RESPONSES, "text": {"format": {"type": "json_object"}}}, 1),
        ("/messages", {"messages": [USER], "max_tokens": 50, "tool_choice": {"type": "any"}}, 1),
        ("/messages", {"messages": [USER], "max_tokens": 50, "tool_choice": {"type": "auto"}}, 0),
    ],
)
async def test_a_call_or_form_that_is_asked_for_is_counted_and_the_policy_stays_free(
    path: str, body: dict[str, Any], asked: int
) -> None:
    async with open_agents(["It is 7."]) as harness, harness.session() as agent:
        response = await agent.post(path, body)
        assert response.status_code == 200 and "It is 7." in response.text
        assert agent.session.counts["asked_form"] == asked


@pytest.mark.parametrize("image", ["https://example.org/x.png", "data:image/png;base64,!!", "data:text/plain,hi"])
async def test_image_that_cannot_be_had_is_refused(image: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": image}}]
    async with open_agents(["It is 7."]) as harness, harness.session() as agent:
        response = await agent.post("/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert response.status_code == 400 and "image" in response.json()["error"]["message"]


async def test_prompt_past_the_context_limit_is_refused_and_a_shorter_one_is_served() -> None:
    limits = RolloutLimits(rollout_tokens=60)
    long = {"role": "user", "content": "word " * 100}
    async with open_agents(["It is 7."], limits=limits) as harness, harness.session() as agent:
        refused = await agent.post("/chat/completions", {"messages": [long]})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert agent.session.overflow
        await agent.chat([USER])
        assert not agent.session.overflow and agent.session.stop is None


async def test_models_tell_the_context_length_of_a_rollout() -> None:
    async with open_agents(["x"], limits=RolloutLimits(rollout_tokens=1234)) as harness, harness.session() as agent:
        headers = {"x-api-key": agent.session.api_key}
        model = (await agent.client.get("/models", headers=headers)).json()["data"][0]
        assert (model["id"], model["context_length"]) == ("policy", 1234)


async def test_two_requests_of_one_branch_at_once_are_two_branches() -> None:
    async with open_agents(["one", "two"]) as harness, harness.session() as agent:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.chat, [USER])
            tasks.start_soon(agent.chat, [USER])
        assert len(agent.session.tree.ledgers()) == 2
        assert len({request.sampling.seed for request in harness.engine.requests}) == 2


async def test_body_that_is_no_json_or_not_declared_as_json_is_refused() -> None:
    async with open_agents(["x"]) as harness, harness.session() as agent:
        headers = {"Authorization": f"Bearer {agent.session.api_key}"}
        for content, kind, status in (
            (b"{", "application/json", 400),
            (b"[1]", "application/json", 400),
            (b"[" * 5000, "application/json", 400),
            (b"{}", "text/plain", 415),
        ):
            sent = {**headers, "content-type": kind}
            response = await agent.client.post("/chat/completions", content=content, headers=sent)
            assert response.status_code == status, response.text


async def test_image_that_a_text_model_cannot_see_becomes_a_note() -> None:
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    content = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": url}}]
    async with open_agents(["x"]) as harness, harness.session() as agent:
        await agent.chat([{"role": "user", "content": content}])
        (ledger,) = agent.session.tree.ledgers()
        assert "image left out" in str(ledger.entries[0].messages)
