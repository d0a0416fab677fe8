"""Clients of `/mcp` that reuse ids, leave answers unread or sessions open: every request ends, and sessions are few."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.gateway import Gateway
from gateway.http import bounded_protocol
from gateway.mcp_server import connected_clients
from gateway.tool_table import Source
from gateway.wire import dumps
from tests.live_server import live_server
from tests.mcp_server.clients import native_source
from tests.waiting import PATIENCE_S, wait_until

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": "first",
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
SLOW_S = 0.2


def make_sources() -> Sequence[Source]:
    async def slow() -> str:
        """Answers after a moment."""
        await anyio.sleep(SLOW_S)
        return "slow"

    async def large() -> str:
        """Answers with more than the buffers between the two take."""
        return "x" * 8_000_000

    return [native_source(slow, large)]


@dataclass
class Mcp:
    """A gateway's `/mcp`, to which raw messages are posted."""

    url: str
    http: httpx2.Client = field(default_factory=lambda: httpx2.Client(timeout=PATIENCE_S))

    def open(self) -> dict[str, str]:
        """Opens a session; the headers of its requests."""
        answer = self.http.post(self.url, json=INITIALIZE, headers=ACCEPT)
        assert answer.status_code == 200
        return {**ACCEPT, "mcp-session-id": answer.headers["mcp-session-id"]}

    def is_open(self, headers: dict[str, str]) -> bool:
        ping = {"jsonrpc": "2.0", "id": "ping", "method": "ping"}
        return self.http.post(self.url, json=ping, headers=headers).status_code == 200


@pytest.fixture(scope="module")
def mcp() -> Iterator[Mcp]:
    with serve_mcp() as served:
        yield served


@contextmanager
def serve_mcp() -> Iterator[Mcp]:
    with live_server(lambda: Gateway(make_sources())) as server:
        served = Mcp(f"{server.url}/mcp")
        with served.http:
            yield served


def call(id: Any, name: str = "slow") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name, "arguments": {}}}


async def post_all(mcp: Mcp, messages: Sequence[bytes]) -> list[tuple[int, str]]:
    """Posts messages at once, each on a connection of its own; status and text of each answer, within the deadline."""
    headers = mcp.open()
    answers: list[tuple[int, str]] = [(0, "")] * len(messages)

    async def post(http: httpx2.AsyncClient, index: int) -> None:
        answer = await http.post(mcp.url, content=messages[index], headers=headers)
        answers[index] = (answer.status_code, answer.text)

    async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for index in range(len(messages)):
                    tasks.start_soon(post, http, index)
    return answers


@pytest.mark.parametrize(("first", "second"), [(7, 7), (7, "7"), ("a", "a"), ("_GET_stream", 1)])
def test_id_that_is_open_is_refused_and_its_call_is_answered(mcp: Mcp, first: Any, second: Any) -> None:
    answers = anyio.run(post_all, mcp, [dumps(call(first)), dumps(call(second)), dumps(call("other"))])
    refused = [text for status, text in answers if status == 400]
    assert len(refused) == 1 and '"id":null' in refused[0]
    assert sum(status == 200 and '"text":"slow"' in text for status, text in answers) == 2


def test_id_is_free_again_once_its_call_has_ended(mcp: Mcp) -> None:
    headers = mcp.open()
    for _ in range(3):
        assert '"text":"slow"' in mcp.http.post(mcp.url, json=call(1), headers=headers).text


IDS: st.SearchStrategy[Any] = st.sampled_from(
    [1, "1", "01", 1.0, 1.5, True, None, "", "_GET_stream", -1, 2**70, [], {}]
)
METHODS = st.sampled_from(
    ["tools/call", "tools/list", "ping", "initialize", "logging/setLevel", "nothing", "", 1, None]
)
CALLS = [{"name": "slow"}, {"name": "slow", "arguments": []}, {"name": "slow", "_meta": {"progressToken": 1}}]
OTHERS: list[Any] = [None, {}, [], "x", {"name": "none"}, {"level": "debug"}, {"requestId": 1}, {"cursor": "7"}]
PARAMS = st.sampled_from([*CALLS, *OTHERS])
REQUESTS = st.fixed_dictionaries({"jsonrpc": st.just("2.0"), "method": METHODS}, optional={"id": IDS, "params": PARAMS})
CANCELS = st.builds(
    lambda id: {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}, IDS
)
ANSWERS = st.builds(lambda id: {"jsonrpc": "2.0", "id": id, "result": {}}, IDS)
MESSAGES = st.one_of(IDS.map(call), REQUESTS, CANCELS, ANSWERS, st.lists(REQUESTS, max_size=2)).map(dumps)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGES | st.binary(max_size=8), min_size=1, max_size=6))
def test_every_request_ends_whatever_its_client_sends(mcp: Mcp, messages: list[bytes]) -> None:
    answers = anyio.run(post_all, mcp, messages)
    assert all(status for status, _ in answers)
    assert mcp.is_open(mcp.open())


def test_stream_is_opened_for_a_client_that_wants_to_resume_what_is_not_kept(mcp: Mcp) -> None:
    resuming = {**mcp.open(), "last-event-id": "7"}
    with mcp.http.stream("GET", mcp.url, headers=resuming) as stream:
        assert stream.status_code == 200


def test_connection_whose_answer_is_never_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "TAKE_S", 0.3)
    with serve_mcp() as mcp:
        headers, url = mcp.open(), httpx2.URL(mcp.url)
        body = dumps(call(1, "large"))
        lines = ["POST /mcp HTTP/1.1", f"host: {url.host}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with socket.create_connection((url.host, url.port or 80), timeout=PATIENCE_S) as caller:
            caller.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            # The id is free when the stream that nobody reads has ended.
            anyio.run(wait_until, lambda: mcp.http.post(mcp.url, json=call(1), headers=headers).status_code == 200)


def test_sessions_beyond_the_limit_end_the_longest_idle_of_the_peer_that_has_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connected_clients, "MAX_CLIENTS", 4)
    with serve_mcp() as mcp:
        used = mcp.open()
        assert mcp.is_open(used)
        abandoned = [mcp.open() for _ in range(8)]
        assert mcp.is_open(used), "those in which nothing was asked for go first"
        assert [mcp.is_open(headers) for headers in abandoned] == [False] * 5 + [True] * 3


def test_sessions_that_are_not_used_go_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_clients, "SWEEP_S", 0.05)
    ended, end = [], connected_clients.ConnectedClients._end

    async def note_end(clients: Any, client: Any) -> None:
        await end(clients, client)
        ended.append(client)

    monkeypatch.setattr(connected_clients.ConnectedClients, "_end", note_end)
    with serve_mcp() as mcp:
        used, abandoned = mcp.open(), mcp.open()
        assert mcp.is_open(used)
        monkeypatch.setattr(connected_clients, "UNUSED_S", 0.1)  # From here: opening and using them takes time, too.
        anyio.run(wait_until, lambda: ended)
        assert mcp.is_open(used) and not mcp.is_open(abandoned)
