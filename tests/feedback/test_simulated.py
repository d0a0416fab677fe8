"""A simulated user speaks through a real HTTP endpoint; its failures are never the policy's score."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import SessionError
from gateway.feedback import endpoint
from gateway.feedback.simulated import SimulatedInteraction, flipped, verdict
from gateway.feedback.toolset import FeedbackToolset
from gateway.types import Feedback, Outcome, Task
from tests.feedback.interactions import answers

KEY = "sk-very-secret"
Answer = Callable[[int, dict[str, Any]], Response]


class Endpoint:
    """A chat endpoint whose answers a test decides."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Answer = lambda count, body: completion("Thanks.")
        self.release = threading.Event()
        self.url = ""

    async def __call__(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        return await anyio.to_thread.run_sync(self.answer, len(self.asked), self.asked[-1])


def completion(text: Any) -> Response:
    return JSONResponse({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def chat() -> Iterator[Endpoint]:
    found = Endpoint()
    app = Starlette(routes=[Route("/v1/chat/completions", found.__call__, methods=["POST"])])
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)  # Whoever comes before the server does waits for it.
        found.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield found
        found.release.set()
        server.should_exit = True
        thread.join(10)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BACKOFF_S", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_BACKOFF_S", 0.02)


async def heard(
    chat: Endpoint, *texts: str, args: dict[str, Any] | None = None, **config: Any
) -> tuple[Feedback, FeedbackToolset]:
    config = {"base_url": chat.url, "model": "m", "api_key": KEY, **config}
    with anyio.fail_after(30):
        task = Task(feedback="user", feedback_args=args or {})
        async with FeedbackToolset({"user": SimulatedInteraction(config)}) as toolset, toolset.open(task) as session:
            return await session.feedback(answers(*texts)), toolset


async def test_the_simulated_user_knows_the_truth_and_the_policy_does_not(chat: Endpoint) -> None:
    feedback, _ = await heard(chat, "Is it 41?", args={"ground_truth": "42", "persona": "You are Ada."})
    assert (feedback.message, feedback.score, feedback.done) == ("Thanks.", 0.0, False)
    system, *turns = chat.asked[0]["messages"]
    assert system["content"].startswith("You are Ada.") and "42" in system["content"]
    assert turns == [
        {"role": "assistant", "content": "What is 40 + 2?"},
        {"role": "user", "content": "Is it 41?"},
    ]
    assert chat.keys == [f"Bearer {KEY}"]
    assert "42" not in repr(feedback)


async def test_the_stop_marker_ends_the_rollout_and_is_cut_out(chat: Endpoint) -> None:
    chat.answer = lambda count, body: completion("That is it. [DONE]")
    feedback, _ = await heard(chat, "42")
    assert (feedback.message, feedback.done, dict(feedback.metadata)) == ("That is it.", True, {"stopped": True})


async def test_a_rule_scores_the_turn_and_a_right_answer_ends_it(chat: Endpoint) -> None:
    right, _ = await heard(chat, "So 42.", args={"ground_truth": 42}, rule="flexible")
    wrong, _ = await heard(chat, "So 41.", args={"ground_truth": 42}, rule="flexible")
    assert (right.score, right.done, wrong.score, wrong.done) == (1.0, True, 0.0, False)


async def test_a_rule_without_a_truth_refuses_the_session(chat: Endpoint) -> None:
    with pytest.raises(SessionError, match="ground_truth"):
        await heard(chat, "42", rule="strict")
    assert chat.asked == []


async def test_a_judge_scores_the_turn_by_json(chat: Endpoint) -> None:
    def answer(count: int, body: dict[str, Any]) -> Response:
        judging = "Judge the assistant" in body["messages"][0]["content"]
        return completion('Sure: {"score": 0.5, "done": true}' if judging else "Hm.")

    chat.answer = answer
    feedback, _ = await heard(chat, "41", args={"ground_truth": 42}, judge=True)
    assert (feedback.message, feedback.score, feedback.done) == ("Hm.", 0.5, True)
    assert chat.asked[0]["temperature"] == 0.0
    assert "assistant: 41" in chat.asked[0]["messages"][1]["content"]


async def test_a_busy_endpoint_is_asked_again(chat: Endpoint) -> None:
    chat.answer = lambda count, body: (
        completion("At last.") if count == 3 else Response("", {1: 429, 2: 503}[count], {"retry-after": "0"})
    )
    feedback, _ = await heard(chat, "42")
    assert (feedback.message, len(chat.asked)) == ("At last.", 3)


@pytest.mark.parametrize(("status", "asked"), [(500, 3), (429, 3), (401, 1), (400, 1), (302, 1)])
async def test_an_endpoint_that_refuses_is_unavailable_and_no_secret_is_told(
    chat: Endpoint, caplog: pytest.LogCaptureFixture, status: int, asked: int
) -> None:
    chat.answer = lambda count, body: Response(f"bad key {KEY}", status)
    feedback, toolset = await heard(chat, "42")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert f"status {status}" in str(feedback.reason)
    assert len(chat.asked) == asked
    assert KEY not in repr(feedback) + caplog.text
    assert toolset.counts["user", "unavailable"] == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"{}", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', b"\xff\xfe"],
)
async def test_garbage_is_unavailable(chat: Endpoint, body: bytes) -> None:
    chat.answer = lambda count, sent: Response(body)
    feedback, _ = await heard(chat, "42")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert "chat completion" in str(feedback.reason) or "without a text" in str(feedback.reason)


async def test_a_huge_answer_is_refused_while_it_is_read(chat: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_BYTES", 1000)
    chat.answer = lambda count, body: completion("x" * 5000)
    feedback, _ = await heard(chat, "42")
    assert "more than 1000 bytes" in str(feedback.reason)


async def test_a_slow_endpoint_times_out_and_is_not_asked_again(chat: Endpoint) -> None:
    def answer(count: int, body: dict[str, Any]) -> Response:
        chat.release.wait(20)
        return completion("late")

    chat.answer = answer
    feedback, _ = await heard(chat, "42", timeout_s=0.3)
    assert feedback.outcome is Outcome.TIMEOUT
    assert len(chat.asked) == 1


async def test_an_endpoint_that_breaks_off_is_not_asked_again(chat: Endpoint) -> None:
    chat.answer = lambda count, body: Response(b"{", headers={"content-length": "1000"})
    feedback, _ = await heard(chat, "42")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert "broke off" in str(feedback.reason)
    assert len(chat.asked) == 1


async def test_a_refused_connection_is_tried_again_and_is_then_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed = Endpoint()
        closed.url = f"http://user:{KEY}@127.0.0.1:{taken.getsockname()[1]}/v1"
        feedback, _ = await heard(closed, "42")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert "cannot be reached" in str(feedback.reason)
    assert KEY not in str(feedback.reason)


async def test_one_client_serves_all_rollouts_and_is_closed_with_the_toolset(
    chat: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[httpx2.AsyncClient] = []

    class Counted(httpx2.AsyncClient):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            built.append(self)

    monkeypatch.setattr(httpx2, "AsyncClient", Counted)
    interaction = SimulatedInteraction({"base_url": chat.url, "model": "m"})
    assert built == [], "nothing is built before it is needed"
    with anyio.fail_after(30):
        async with FeedbackToolset({"user": interaction}) as toolset, anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(_one_rollout, toolset)
    assert len(chat.asked) == 8
    assert [client.is_closed for client in built] == [True]
    assert chat.keys == [None] * 8


async def _one_rollout(toolset: FeedbackToolset) -> None:
    async with toolset.open(Task()) as session:
        assert (await session.feedback(answers("a"))).outcome is Outcome.OK


@pytest.mark.parametrize(
    "text",
    ["", "great", "{", '{"points": 1}', '{"score": "1"}', '{"score": true}', '{"score": 2}', '{"score": NaN}', "[1]"],
)
def test_a_judge_without_a_score_is_unavailable(text: str) -> None:
    with pytest.raises(Exception, match="the judge at here"):
        verdict(text, "here")


def test_only_what_both_sides_said_is_shown_to_the_user() -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a"},
    ]
    assert json.dumps(flipped(chat)) == json.dumps(
        [{"role": "assistant", "content": "u"}, {"role": "user", "content": "a"}]
    )


def test_the_key_is_in_no_repr(chat: Endpoint) -> None:
    interaction = SimulatedInteraction({"base_url": chat.url, "model": "m", "api_key": KEY})
    assert KEY not in repr(interaction.settings)
