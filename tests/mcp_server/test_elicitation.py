"""Elicitation, sampling and roots requests reach the client that made the call, for every pair of protocol versions."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client

from gateway.mcp_server import client_context
from gateway.session import ObservedCall
from gateway.types import Outcome
from tests.mcp_server.clients import (
    CLIENT_MODES,
    connect_to_eliciting_server,
    crossed_protocols,
    protocol_pairs,
    text_of,
)

upstreams = pytest.mark.parametrize("upstream", CLIENT_MODES)


async def answer_elicitation(ctx: Any, params: Any) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"name": "Ada"})


async def answer_sampling(ctx: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
    return types.CreateMessageResult(role="assistant", content=types.TextContent(text="4"), model="small")


async def list_roots(ctx: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri="file:///work")])


ALL_CALLBACKS: dict[str, Any] = {
    "elicitation_callback": answer_elicitation,
    "sampling_callback": answer_sampling,
    "list_roots_callback": list_roots,
}


@protocol_pairs
async def test_elicitation_sampling_and_roots_are_answered(upstream: str, protocol: str) -> None:
    async with connect_to_eliciting_server(protocol, upstream, **ALL_CALLBACKS) as (client, _):
        result = await client.call_tool("ask", {"whom": ["user", "model", "roots"]})
        assert text_of(result) == "accept Ada; 4; file:///work" and not result.is_error


@crossed_protocols
async def test_client_without_the_capability_gets_no_request(upstream: str, protocol: str) -> None:
    async with connect_to_eliciting_server(protocol, upstream, elicitation_callback=answer_elicitation) as (client, _):
        try:
            result = await client.call_tool("ask", {"whom": ["model"]})
        except MCPError as rejected:
            assert "sampling" in str(rejected)
        else:
            assert result.is_error and "sampling" in text_of(result)


async def call_ask(client: Client, *whom: str, **options: Any) -> Any:
    """One call of the tool `ask`; returns input requests as they are."""
    return await client.session.call_tool("ask", {"whom": list(whom)}, allow_input_required=True, **options)


def input_responses(**by_key: Any) -> dict[str, Any]:
    known = {
        "user": types.ElicitResult(action="accept", content={"name": "Ada"}),
        "roots": types.ListRootsResult(roots=[types.Root(uri="file:///work")]),
    }
    return {key: known[kind] for key, kind in by_key.items()}


async def test_missing_inputs_are_requested_again() -> None:
    async with connect_to_eliciting_server("2026", "2026", **ALL_CALLBACKS) as (client, _):
        waiting = await call_ask(client, "user", "roots")
        given = {"input_responses": input_responses(user="user"), "request_state": waiting.request_state}
        half_answered = await call_ask(client, "user", "roots", **given)
        assert isinstance(half_answered, types.InputRequiredResult)
        assert set(half_answered.input_requests or ()) == {"roots"}
        assert half_answered.request_state != waiting.request_state
        given = {"input_responses": input_responses(roots="roots"), "request_state": half_answered.request_state}
        assert text_of(await call_ask(client, "user", "roots", **given)) == "accept Ada; file:///work"


@upstreams
async def test_request_state_works_once_and_only_for_its_request(upstream: str) -> None:
    async with connect_to_eliciting_server("2026", upstream, **ALL_CALLBACKS) as (client, _):
        waiting = await call_ask(client, "user")
        responses = input_responses(**dict.fromkeys(waiting.input_requests, "user"))
        rejected = pytest.raises(MCPError, match="requestState belongs to another request")
        with rejected:
            await call_ask(client, "user", input_responses=responses, request_state=waiting.request_state + "x")
        assert (
            text_of(await call_ask(client, "user", input_responses=responses, request_state=waiting.request_state))
            == "accept Ada"
        )
        with rejected:
            await call_ask(client, "user", input_responses=responses, request_state=waiting.request_state)
        waiting = await call_ask(client, "user")
        with rejected:
            await call_ask(client, "user", "user", input_responses=responses, request_state=waiting.request_state)


@upstreams
async def test_waiting_call_ends_if_the_client_never_returns(upstream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = anyio.Event()
    observed: list[ObservedCall] = []

    def observe(call: ObservedCall) -> None:
        observed.append(call)
        ended.set()

    monkeypatch.setattr(client_context, "INPUT_TIMEOUT_S", 0.05)
    async with connect_to_eliciting_server("2026", upstream, **ALL_CALLBACKS) as (client, gateway):
        gateway.observers.append(observe)
        waiting = await call_ask(client, "user")
        await ended.wait()
        assert observed[0].result.outcome is Outcome.ERROR
        with pytest.raises(MCPError, match="has expired"):
            await call_ask(client, "user", request_state=waiting.request_state)
