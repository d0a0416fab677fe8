"""Questions of a server that nobody is there to answer: declined, answered from the file, or by the interaction."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.config.server_auth import Answers
from gateway.elicitation import ElicitationAnswers
from gateway.errors import RequestDeclined
from gateway.gateway import Gateway
from gateway.types import Context, Feedback, Outcome, Text, ToolCall
from tests.conftest import Write
from tests.servers.forked_server import forked_command

SERVER = Path(__file__).parents[2] / "bench/conformance/everything_server.py"
ASK = "test_input_required_result_elicitation"
ORDER = {
    "message": "What do you want?",
    "requestedSchema": {
        "type": "object",
        "properties": {
            "size": {"type": "string", "enum": ["S", "M"], "default": "M"},
            "count": {"type": "integer", "minimum": 1, "default": 1},
            "gift": {"type": "boolean"},
        },
        "required": ["size"],
    },
}


async def answer(answers: Answers, params: Any = ORDER) -> Any:
    return await ElicitationAnswers("shop", answers).answer("elicitation/create", params)


async def test_given_values_replace_defaults_and_other_fields_are_left_out() -> None:
    accepted = await answer({"gift": True, "count": 3, "colour": "red"})
    assert accepted == {"action": "accept", "content": {"size": "M", "count": 3, "gift": True}}
    assert await answer("defaults") == {"action": "accept", "content": {"size": "M", "count": 1}}
    needed = {"requestedSchema": {"properties": {"name": {"type": "string"}}, "required": ["name"]}}
    assert await answer("decline") == await answer("defaults", needed) == {"action": "decline"}
    with pytest.raises(RequestDeclined, match="sampling/createMessage"):
        await ElicitationAnswers("shop", "defaults").answer("sampling/createMessage", {})


@pytest.mark.parametrize("values", [{"size": "XXL"}, {"count": 0}, {"count": "three"}])
async def test_values_that_do_not_fit_the_schema_are_never_sent(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await answer(values) == {"action": "decline"}
    assert "server 'shop' is declined" in caplog.text
    assert not any(str(value) in caplog.text for value in values.values() if isinstance(value, str))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"requestedSchema": "no schema"},
        {"requestedSchema": {"properties": ["a"]}},
        {"requestedSchema": {"properties": {"a": "text"}}},
        {"requestedSchema": {"properties": {f"f{number}": {} for number in range(1000)}}},
        {"mode": "url", "url": "https://example.org", "requestedSchema": {}},
    ],
)
async def test_questions_that_are_no_form_are_declined(params: dict[str, Any]) -> None:
    assert await answer("defaults", params) == {"action": "decline"}


@pytest.mark.parametrize(
    ("reply", "schema", "content"),
    [
        ("Yes, please.", {"gift": {"type": "boolean"}}, {"gift": True}),
        ("no", {"gift": {"type": "boolean"}}, {"gift": False}),
        ("12", {"count": {"type": "integer"}}, {"count": 12}),
        ("2.5", {"weight": {"type": "number"}}, {"weight": 2.5}),
        ('{"a": "x", "b": 2, "c": 3}', {"a": {"type": "string"}, "b": {"type": "integer"}}, {"a": "x", "b": 2}),
        ("perhaps", {"gift": {"type": "boolean"}}, None),
        ("many", {"count": {"type": "integer"}}, None),
        ("Ada", {"a": {"type": "string"}, "b": {"type": "string"}}, None),
        ("fine", {}, {}),
        ("No!", {}, None),
    ],
)
async def test_reply_of_the_interaction_is_read_by_the_schema(
    reply: str, schema: dict[str, Any], content: dict[str, Any] | None
) -> None:
    async def ask(question: str) -> Feedback:
        assert "Well?" in question and all(name in question for name in schema)
        return Feedback((Text(reply),))

    context = ElicitationAnswers("shop", "interaction").with_interaction(Context(), ask)
    assert context.answer_request is not None
    params = {"message": "Well?", "requestedSchema": {"type": "object", "properties": schema}}
    expected = {"action": "decline"} if content is None else {"action": "accept", "content": content}
    assert await context.answer_request("elicitation/create", params) == expected


async def test_interaction_that_fails_answers_nothing_rather_than_declining() -> None:
    async def ask(question: str) -> Feedback:
        return Feedback((Text("Ada"),), outcome=Outcome.UNAVAILABLE, reason="the user is down")

    context = ElicitationAnswers("shop", "interaction").with_interaction(Context(), ask)
    assert context.answer_request is not None
    params = {"message": "Well?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}}
    with pytest.raises(RequestDeclined, match="the interaction did not answer: the user is down"):
        await context.answer_request("elicitation/create", params)


INTERACTION = """
interaction:
  - name: user
    class_name: gateway.feedback.scripted.ScriptedInteraction
    config:
      replies:
        - {say: Ada, contains: name, score: 5}
"""


@pytest.mark.parametrize(("answers", "text"), [({"name": "Grace"}, "Hello, Grace!"), ("interaction", "Hello, Ada!")])
async def test_tool_that_asks_in_a_rollout_gets_an_answer(write: Write, answers: object, text: str) -> None:
    command, args = forked_command(SERVER)
    shop = {"command": command, "args": args, "answers": answers}
    servers = write("mcp_servers.json", json.dumps({"mcpServers": {"shop": shop}}))
    user = write("tools/user.yaml", INTERACTION)
    with anyio.fail_after(60):
        async with Gateway.load(user, servers) as gateway, gateway.open() as session:
            result = await session.call(ToolCall("1", ASK, "{}"))
            assert session.rewards == [], "the interaction's score is for the policy's turns"
    assert (result.outcome, result.text) == (Outcome.OK, text)
