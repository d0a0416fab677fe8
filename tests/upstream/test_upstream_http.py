"""One post's failure is its own, and what a server answers with means one thing only."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import httpx2
import pytest
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from gateway.types import ALONE
from gateway.upstream.fault import Flight, flight_now
from gateway.upstream.inbox import Inbox
from gateway.upstream.streamable import Posts, streamable_client
from gateway.upstream.web import Web

URL = "http://here.test/mcp"
Answer = Callable[[httpx2.Request], httpx2.Response]
OK = {"jsonrpc": "2.0", "id": 1, "result": {"fine": True}}


@dataclass
class Talk:
    """A transport whose other end is a function."""

    inbox: Inbox
    posts: Posts
    seen: list[httpx2.Request] = field(default_factory=list)

    async def tell(self, message: JSONRPCMessage, version: str = "2025-11-25") -> None:
        headers = {"mcp-protocol-version": version}
        await self.posts.send(SessionMessage(message, ClientMessageMetadata(headers=headers)))

    async def ask(self, method: str = "tools/call", number: int = 1) -> tuple[JSONRPCMessage, Flight]:
        flight = Flight(ALONE)
        token = flight_now.set(flight)
        await self.tell(JSONRPCRequest(jsonrpc="2.0", id=number, method=method))
        flight_now.reset(token)
        with anyio.fail_after(10):
            item = await self.inbox.receive()
        assert isinstance(item, SessionMessage)
        return item.message, flight


@asynccontextmanager
async def talking(answer: Answer, most_bytes: int = 10_000) -> AsyncIterator[Talk]:
    seen: list[httpx2.Request] = []

    def noted(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        given = answer(request)
        # A response that is made with its content counts as read; one from a network is still to be.
        return httpx2.Response(given.status_code, headers=given.headers, stream=httpx2.ByteStream(given.content))

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(noted))
    secret = {"authorization": "Bearer s3cret"}
    async with client, streamable_client(URL, client, secret, most_bytes) as (inbox, posts):
        yield Talk(inbox, posts, seen)


def stream(*events: str) -> httpx2.Response:
    content = "".join(f"{event}\n\n" for event in events).encode()
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=content)


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_a_server_that_broke_over_a_request_may_have_done_it(status: int) -> None:
    async with talking(lambda request: httpx2.Response(status)) as talk:
        message, flight = await talk.ask()
        assert isinstance(message, JSONRPCError) and message.id == 1
        assert flight.broken == f"HTTP {status}" and flight.refused is None


@pytest.mark.parametrize("status", [400, 405, 413, 429, 503])
async def test_a_server_that_refused_a_request_has_not_done_it(status: int) -> None:
    async with talking(lambda request: httpx2.Response(status)) as talk:
        _, flight = await talk.ask()
        assert flight.refused == f"HTTP {status}" and flight.broken is None and not flight.unreachable


async def test_a_refusal_in_json_rpc_is_the_servers_own_word() -> None:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "no such tool", "data": [1]}}
    async with talking(lambda request: httpx2.Response(400, json=body)) as talk:
        message, flight = await talk.ask()
        assert isinstance(message, JSONRPCError)
        assert (message.id, message.error.code, message.error.data) == (1, -32602, [1])
        assert flight.refused is None


async def test_a_session_that_is_not_found_is_lost() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if b"initialize" in request.content:
            return httpx2.Response(200, json=OK, headers={"mcp-session-id": "abc"})
        return httpx2.Response(404)

    async with talking(answer) as talk:
        await talk.ask("initialize")
        _, flight = await talk.ask(number=2)
        assert flight.session_lost
        assert talk.seen[-1].headers["mcp-session-id"] == "abc"
    assert talk.seen[-1].method == "DELETE"


@pytest.mark.parametrize("place", ["/other", "http://elsewhere.test/mcp", "https://here.test/mcp"])
async def test_a_redirect_is_followed_within_its_origin_only(place: str) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return (
            httpx2.Response(307, headers={"location": place}) if request.url == URL else httpx2.Response(200, json=OK)
        )

    async with talking(answer) as talk:
        message, flight = await talk.ask()
        followed = [str(request.url) for request in talk.seen[1:]]
        if place == "/other":
            assert isinstance(message, JSONRPCResponse) and followed == ["http://here.test/other"]
        else:
            assert followed == [] and flight.refused is not None and place in flight.refused


async def test_a_cookie_is_never_sent_back() -> None:
    client = await Web().client(URL)
    assert client.cookies.jar._policy.is_not_allowed("here.test")  # type: ignore[attr-defined]
    request = client.build_request("GET", URL)
    response = httpx2.Response(200, headers={"set-cookie": "a=b"}, request=request)
    client.cookies.extract_cookies(response)
    assert "cookie" not in client.build_request("GET", URL).headers
    await client.aclose()


async def test_clients_are_made_once_for_all_servers() -> None:
    web = Web()
    assert await web.client("http://one.test") is await web.client("http://two.test")
    assert await web.client("https://one.test") is await web.client("HTTPS://two.test")
    assert await web.client("http://one.test") is not await web.client("https://one.test")
    await web.aclose()


async def test_a_stream_that_ends_without_the_answer_leaves_it_unknown() -> None:
    async with talking(lambda request: stream(": hello")) as talk:
        message, flight = await talk.ask()
        assert isinstance(message, JSONRPCError)
        assert flight.broken == "the stream of the answer ended without an answer"


async def test_a_stream_that_says_how_to_go_on_is_gone_on_with() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            return stream("id: 7\nretry: 10\ndata:")
        return stream(f"id: 8\ndata: {json.dumps(OK)}")

    async with talking(answer) as talk:
        message, _ = await talk.ask()
        assert isinstance(message, JSONRPCResponse) and message.result == {"fine": True}
        assert talk.seen[1].headers["last-event-id"] == "7"


async def test_garbage_in_a_stream_is_passed_over() -> None:
    async with talking(lambda request: stream("data: {no json", f"data: {json.dumps(OK)}")) as talk:
        message, _ = await talk.ask()
        assert isinstance(message, JSONRPCResponse)


@pytest.mark.parametrize("content", [b"<html>", b"", b'{"jsonrpc":"2.0","id":99,"result":{}}'])
async def test_a_body_without_the_answer_is_said_to_be_none(content: bytes) -> None:
    async with talking(lambda request: httpx2.Response(200, content=content)) as talk:
        message, _ = await talk.ask()
        while not isinstance(message, JSONRPCError):
            item = await talk.inbox.receive()
            assert isinstance(item, SessionMessage)
            message = item.message
        assert "is not JSON-RPC" in message.error.message


@pytest.mark.parametrize(("version", "posted"), [("2025-11-25", True), ("2026-07-28", False)])
async def test_a_request_is_cancelled_in_the_way_of_its_era(version: str, posted: bool) -> None:
    told = anyio.Event()

    def answer(request: httpx2.Request) -> httpx2.Response:
        told.set()
        return httpx2.Response(202)

    async with talking(answer) as talk:
        cancel = JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params={"requestId": 1})
        await talk.tell(cancel, version)
        if posted:
            with anyio.fail_after(5):
                await told.wait()
        await talk.tell(JSONRPCNotification(jsonrpc="2.0", method="notifications/other"), version)
        assert [b"cancelled" in request.content for request in talk.seen] == [True, False][not posted :]


async def test_a_post_that_breaks_is_its_own_and_the_next_one_works() -> None:
    answers = iter([httpx2.ReadError("reset"), httpx2.ConnectError("refused"), None])

    def answer(request: httpx2.Request) -> httpx2.Response:
        error = next(answers)
        if error is not None:
            raise error
        return httpx2.Response(200, json={**OK, "id": 3})

    async with talking(answer) as talk:
        _, broken = await talk.ask(number=1)
        _, refused = await talk.ask(number=2)
        message, fine = await talk.ask(number=3)
        assert broken.broken and not broken.unreachable
        assert refused.unreachable and refused.refused and "here.test" in refused.refused
        assert isinstance(message, JSONRPCResponse) and fine.status == 200
