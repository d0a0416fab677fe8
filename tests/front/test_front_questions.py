"""A tool may ask whoever called it, across every pair of eras; nobody else can answer in their place."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client

from gateway.front import held
from gateway.session import Observed
from gateway.types import Outcome
from tests.front.kit import ERAS, asking, words

PAIRS = [(upstream, era) for upstream in ERAS for era in ERAS]
pairs = pytest.mark.parametrize(("upstream", "era"), PAIRS, ids=[f"{u}-behind-{e}" for u, e in PAIRS])
upstreams = pytest.mark.parametrize("upstream", ERAS)


async def user(ctx: Any, params: Any) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"name": "Ada"})


async def model(ctx: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
    return types.CreateMessageResult(role="assistant", content=types.TextContent(text="4"), model="small")


async def roots(ctx: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri="file:///work")])


EVERYONE: dict[str, Any] = {
    "elicitation_callback": user,
    "sampling_callback": model,
    "list_roots_callback": roots,
}


@pairs
async def test_user_model_and_roots_are_asked(upstream: str, era: str) -> None:
    async with asking(era, upstream, **EVERYONE) as (client, _):
        result = await client.call_tool("ask", {"whom": ["user", "model", "roots"]})
        assert words(result) == "accept Ada; 4; file:///work" and not result.is_error


@pairs
async def test_a_user_may_decline(upstream: str, era: str) -> None:
    async def no(ctx: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="decline")

    async with asking(era, upstream, elicitation_callback=no) as (client, _):
        assert words(await client.call_tool("ask", {"whom": ["user"]})) == "decline None"


@pairs
async def test_who_cannot_answer_is_not_asked(upstream: str, era: str) -> None:
    async with asking(era, upstream, elicitation_callback=user) as (client, _):
        try:
            result = await client.call_tool("ask", {"whom": ["model"]})
        except MCPError as refused:
            assert "sampling" in str(refused)
        else:
            assert result.is_error and "sampling" in words(result)


@pytest.mark.parametrize("era", ERAS)
async def test_a_prompt_may_ask_too(era: str) -> None:
    async with asking(era, "2026", **EVERYONE) as (client, _):
        (message,) = (await client.get_prompt("greet", {"word": "?"})).messages
        assert isinstance(message.content, types.TextContent)
        assert message.content.text == "asker greets accept Ada"


async def begin(client: Client, *whom: str, **more: Any) -> Any:
    """The first round, as it comes."""
    return await client.session.call_tool("ask", {"whom": list(whom)}, allow_input_required=True, **more)


def answers(**by_key: Any) -> dict[str, Any]:
    known = {
        "user": types.ElicitResult(action="accept", content={"name": "Ada"}),
        "roots": types.ListRootsResult(roots=[types.Root(uri="file:///work")]),
    }
    return {key: known[kind] for key, kind in by_key.items()}


async def test_questions_keep_their_keys_and_are_asked_together() -> None:
    async with asking("2026", "2026", **EVERYONE) as (client, _):
        asked = await begin(client, "user", "roots")
        assert isinstance(asked, types.InputRequiredResult)
        assert set(asked.input_requests or ()) == {"user", "roots"}
        given = answers(user="user", roots="roots")
        done = await begin(client, "user", "roots", input_responses=given, request_state=asked.request_state)
        assert words(done) == "accept Ada; file:///work"


async def test_what_is_still_missing_is_asked_again() -> None:
    async with asking("2026", "2026", **EVERYONE) as (client, _):
        asked = await begin(client, "user", "roots")
        half = await begin(
            client, "user", "roots", input_responses=answers(user="user"), request_state=asked.request_state
        )
        assert isinstance(half, types.InputRequiredResult) and set(half.input_requests or ()) == {"roots"}
        assert half.request_state != asked.request_state
        done = await begin(
            client, "user", "roots", input_responses=answers(roots="roots"), request_state=half.request_state
        )
        assert words(done) == "accept Ada; file:///work"


async def test_answers_that_come_with_the_question_are_used() -> None:
    async with asking("2026", "2026", **EVERYONE) as (client, _):
        done = await begin(client, "user", input_responses=answers(user="user", stray="roots"))
        assert words(done) == "accept Ada"


@upstreams
async def test_what_names_a_waiting_call_works_once_and_for_its_own_request_only(upstream: str) -> None:
    async with asking("2026", upstream, **EVERYONE) as (client, _):
        asked = await begin(client, "user")
        given = answers(**dict.fromkeys(asked.input_requests, "user"))
        refused = pytest.raises(MCPError, match="requestState is not of this request")
        with refused:
            await begin(client, "user", input_responses=given, request_state=asked.request_state + "x")
        assert (
            words(await begin(client, "user", input_responses=given, request_state=asked.request_state)) == "accept Ada"
        )
        with refused:
            await begin(client, "user", input_responses=given, request_state=asked.request_state)
        asked = await begin(client, "user")
        with refused:
            await begin(client, "user", "user", input_responses=given, request_state=asked.request_state)


@upstreams
async def test_a_call_whose_caller_never_comes_back_is_ended(upstream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = anyio.Event()
    seen: list[Observed] = []

    def observe(one: Observed) -> None:
        seen.append(one)
        ended.set()

    monkeypatch.setattr(held, "PATIENCE_S", 0.05)
    async with asking("2026", upstream, **EVERYONE) as (client, gateway):
        gateway.observers.append(observe)
        asked = await begin(client, "user")
        await ended.wait()
        assert seen[0].result.outcome is Outcome.ERROR
        with pytest.raises(MCPError, match="has expired"):
            await begin(client, "user", request_state=asked.request_state)
