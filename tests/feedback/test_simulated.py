"""Tests of the simulated user with a real HTTP endpoint; failures of the endpoint give no score."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import anyio
import httpx2
import pytest
from starlette.responses import Response

from gateway.errors import SessionError
from gateway.feedback import simulated
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.feedback.simulated import SimulatedInteraction, swap_roles
from gateway.types import Feedback, Outcome, Task
from tests.feedback.interactions import make_chat
from tests.servers.chat_endpoint import ChatServer, completion, serve_chat

API_KEY = "sk-very-secret"


@pytest.fixture
def endpoint() -> Iterator[ChatServer]:
    with serve_chat() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "BACKOFF_S", 0.01)
    monkeypatch.setattr(simulated, "MAX_BACKOFF_S", 0.02)


async def get_feedback(
    endpoint: ChatServer, *texts: str, args: dict[str, Any] | None = None, **config: Any
) -> tuple[Feedback, FeedbackToolset]:
    config = {"base_url": endpoint.url, "model": "m", "api_key": API_KEY, **config}
    with anyio.fail_after(60):
        task = Task(feedback="user", feedback_args=args or {})
        async with FeedbackToolset({"user": SimulatedInteraction(config)}) as toolset, toolset.open(task) as session:
            return await session.feedback(make_chat(*texts)), toolset


async def test_only_the_simulating_model_gets_the_ground_truth(endpoint: ChatServer) -> None:
    feedback, _ = await get_feedback(endpoint, "Is it 41?", args={"ground_truth": "42", "persona": "You are Ada."})
    assert (feedback.message, feedback.score, feedback.done) == ("Thanks.", 0.0, False)
    system, *turns = endpoint.requests[0]["messages"]
    assert system["content"].startswith("You are Ada.") and "42" in system["content"]
    assert turns == [{"role": "assistant", "content": "What is 40 + 2?"}, {"role": "user", "content": "Is it 41?"}]
    assert endpoint.keys == [f"Bearer {API_KEY}"]
    assert "42" not in repr(feedback)


async def test_a_rule_scores_the_turn_and_a_right_answer_ends_it(endpoint: ChatServer) -> None:
    right, _ = await get_feedback(endpoint, "So 42.", args={"ground_truth": 42}, rule="flexible")
    wrong, _ = await get_feedback(endpoint, "So 41.", args={"ground_truth": 42}, rule="flexible")
    assert (right.score, right.done, wrong.score, wrong.done) == (1.0, True, 0.0, False)


async def test_a_busy_endpoint_is_asked_again_and_the_stop_text_ends_the_rollout(endpoint: ChatServer) -> None:
    answers = [Response("", 429), Response("", 503), completion("Yes. [DONE]")]
    endpoint.respond = lambda count, _: answers[count - 1]
    feedback, _ = await get_feedback(endpoint, "42")
    assert (feedback.message, feedback.done, dict(feedback.metadata)) == ("Yes.", True, {"stopped": True})


async def test_what_may_have_been_answered_is_not_asked_again(endpoint: ChatServer) -> None:
    endpoint.respond = lambda count, _: Response(b"{", headers={"content-length": "1000"})
    broken, _ = await get_feedback(endpoint, "42")
    endpoint.respond = lambda count, _: completion(str(endpoint.release.wait(20)))
    late, _ = await get_feedback(endpoint, "42", timeout_s=2)
    assert (broken.outcome, late.outcome) == (Outcome.UNAVAILABLE, Outcome.TIMEOUT)
    assert "broke off" in str(broken.reason) and len(endpoint.requests) == 2
    with pytest.raises(SessionError, match="a `rule` needs `ground_truth`"):
        await get_feedback(endpoint, "42", rule="strict")


def test_the_simulated_user_sees_only_texts_of_user_and_assistant() -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "image"}]}
    unseen = [{"role": "system", "content": "s"}, {"role": "tool", "content": "t"}, {"role": "assistant"}]
    chat = [user, *unseen, {"role": "assistant", "content": "a"}]
    assert swap_roles(chat) == [{"role": "assistant", "content": "u"}, {"role": "user", "content": "a"}]


async def test_a_judge_scores_the_turn(endpoint: ChatServer) -> None:
    def respond(count: int, body: dict[str, Any]) -> Response:
        is_judge = "Judge the assistant" in body["messages"][0]["content"]
        return completion('Sure: {"score": 0.5, "done": true}' if is_judge else "Hm.")

    endpoint.respond = respond
    feedback, _ = await get_feedback(endpoint, "41", args={"ground_truth": 42}, judge=True)
    assert (feedback.message, feedback.score, feedback.done) == ("Hm.", 0.5, True)
    assert endpoint.requests[0]["temperature"] == 0.0
    assert "assistant: 41" in endpoint.requests[0]["messages"][1]["content"]


@pytest.mark.parametrize(("status", "requests"), [(500, 3), (429, 3), (401, 1), (400, 1), (302, 1)])
async def test_an_http_error_is_unavailable_and_messages_have_no_secret(
    endpoint: ChatServer, caplog: pytest.LogCaptureFixture, status: int, requests: int
) -> None:
    endpoint.respond = lambda count, body: Response(f"bad key {API_KEY}", status)
    feedback, toolset = await get_feedback(endpoint, "42")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert f"status {status}" in str(feedback.reason)
    assert len(endpoint.requests) == requests
    assert API_KEY not in repr(feedback) + caplog.text
    assert toolset.counts["user", "unavailable"] == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"{}", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', b"\xff\xfe"],
)
async def test_an_invalid_response_is_unavailable(endpoint: ChatServer, body: bytes) -> None:
    endpoint.respond = lambda count, sent: Response(body)
    feedback, _ = await get_feedback(endpoint, "42")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert "chat completion" in str(feedback.reason) or "without a text" in str(feedback.reason)


async def test_a_huge_response_is_refused_while_it_is_read(
    endpoint: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "MAX_RESPONSE_BYTES", 1000)
    endpoint.respond = lambda count, body: completion("x" * 5000)
    feedback, _ = await get_feedback(endpoint, "42")
    assert "more than 1000 bytes" in str(feedback.reason)


async def test_a_refused_connection_is_retried_and_then_unavailable() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        unreachable = ChatServer()
        unreachable.url = f"http://user:{API_KEY}@127.0.0.1:{reserved.getsockname()[1]}/v1"
        feedback, _ = await get_feedback(unreachable, "42")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert "cannot be reached" in str(feedback.reason)
    assert API_KEY not in str(feedback.reason)


async def test_rollouts_share_one_http_client_which_is_closed_with_the_toolset(
    endpoint: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[httpx2.AsyncClient] = []

    class CountedClient(httpx2.AsyncClient):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            clients.append(self)

    monkeypatch.setattr(httpx2, "AsyncClient", CountedClient)
    interaction = SimulatedInteraction({"base_url": endpoint.url, "model": "m"})
    assert clients == [], "the client is created when it is needed"
    with anyio.fail_after(60):
        async with FeedbackToolset({"user": interaction}) as toolset, anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(run_rollout, toolset)
    assert len(endpoint.requests) == 8
    assert [client.is_closed for client in clients] == [True]
    assert endpoint.keys == [None] * 8


async def run_rollout(toolset: FeedbackToolset) -> None:
    async with toolset.open(Task()) as session:
        assert (await session.feedback(make_chat("a"))).outcome is Outcome.OK
