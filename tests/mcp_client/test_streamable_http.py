"""The streamable HTTP transport: what each kind of response means, and that a failed POST affects no other."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import httpx2
import pytest
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from gateway.mcp_client.dispatcher import Dispatcher
from gateway.mcp_client.errors import PendingRequest, current_request
from gateway.mcp_client.framing import Inbox
from gateway.mcp_client.http_client import AuthorizedClient, send_request
from gateway.mcp_client.streamable_http import StreamableHttpWriter, streamable_client
from gateway.types import DEFAULT_CONTEXT
from tests.waiting import PATIENCE_S

URL = "http://here.test/mcp"
Respond = Callable[[httpx2.Request], httpx2.Response]
OK = {"jsonrpc": "2.0", "id": 1, "result": {"fine": True}}


class Messages(Dispatcher):
    """Keeps what its transport passes to it."""

    def __init__(self) -> None:
        self._put, self._messages = anyio.create_memory_object_stream[JSONRPCMessage](100)

    is_reading = False
    unreadable = ""

    def note_unreadable(self, problem: str) -> None:
        self.unreadable = problem

    async def receive(self, message: JSONRPCMessage) -> None:
        self._put.send_nowait(message)

    async def next(self) -> JSONRPCMessage:
        with anyio.fail_after(PATIENCE_S):
            return await self._messages.receive()

    def close(self) -> None:
        self._put.close()
        self._messages.close()


@dataclass
class Exchange:
    """A transport whose server is a function."""

    messages: Messages
    writer: StreamableHttpWriter
    requests: list[httpx2.Request] = field(default_factory=list)

    async def send(self, message: JSONRPCMessage, version: str = "2025-11-25") -> None:
        await self.writer.send(message, {"mcp-protocol-version": version})

    async def request(self, method: str = "tools/call", request_id: int = 1) -> tuple[JSONRPCMessage, PendingRequest]:
        pending = PendingRequest(DEFAULT_CONTEXT)
        token = current_request.set(pending)
        await self.send(JSONRPCRequest(jsonrpc="2.0", id=request_id, method=method))
        current_request.reset(token)
        return await self.messages.next(), pending


@asynccontextmanager
async def connect_to_function(respond: Respond) -> AsyncIterator[Exchange]:
    requests: list[httpx2.Request] = []

    def record(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        response = respond(request)
        # A response built with its content counts as read; one from a network does not.
        return httpx2.Response(
            response.status_code, headers=response.headers, stream=httpx2.ByteStream(response.content), request=request
        )

    client = httpx2.MockTransport(record)
    secret = {"authorization": "Bearer s3cret"}
    messages = Messages()
    inbox = Inbox(messages, 10_000)
    async with client, streamable_client(URL, AuthorizedClient(client), secret, inbox) as writer:
        yield Exchange(messages, writer, requests)
    messages.close()


def event_stream(*events: str) -> httpx2.Response:
    content = "".join(f"{event}\n\n" for event in events).encode()
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=content)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_answer_that_is_compressed_in_spite_of_identity_is_told_as_that(kind: str) -> None:
    headers = {"content-type": kind, "content-encoding": "gzip"}
    async with connect_to_function(lambda _: httpx2.Response(200, headers=headers, content=gzip.compress(b"{}"))) as to:
        message, _ = await to.request()
        assert isinstance(message, JSONRPCError) and "compressed (gzip)" in message.error.message


@pytest.mark.parametrize("status", [500, 504, 400, 429, 503])
async def test_status_tells_whether_the_request_may_have_run(status: int) -> None:
    async with connect_to_function(lambda request: httpx2.Response(status)) as exchange:
        message, pending = await exchange.request()
        assert isinstance(message, JSONRPCError) and message.id == 1 and not pending.unreachable
        reasons = (f"HTTP {status}", None) if status in (500, 504) else (None, f"HTTP {status}")
        assert (pending.lost_reason, pending.undelivered_reason) == reasons


async def test_session_not_found_is_reported_as_lost() -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        if b"initialize" in request.content:
            return httpx2.Response(200, json=OK, headers={"mcp-session-id": "abc"})
        return httpx2.Response(404)

    async with connect_to_function(respond) as exchange:
        await exchange.request("initialize")
        _, pending = await exchange.request(request_id=2)
        assert pending.session_lost
        assert exchange.requests[-1].headers["mcp-session-id"] == "abc"
    assert exchange.requests[-1].method == "DELETE"


@pytest.mark.parametrize("location", ["/other", "http://elsewhere.test/mcp", "https://here.test/mcp"])
async def test_redirect_is_followed_only_within_its_origin(location: str) -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        is_first = request.url == URL
        return httpx2.Response(307 if is_first else 200, headers={"location": location} if is_first else {}, json=OK)

    async with connect_to_function(respond) as exchange:
        message, pending = await exchange.request()
        followed = [str(request.url) for request in exchange.requests[1:]]
        if location == "/other":
            assert isinstance(message, JSONRPCResponse) and followed == ["http://here.test/other"]
        else:
            assert followed == [] and pending.undelivered_reason is not None and location in pending.undelivered_reason


async def test_cookies_are_never_sent_back() -> None:
    async with connect_to_function(lambda _: httpx2.Response(200, headers={"set-cookie": "a=b"}, json=OK)) as exchange:
        await exchange.request()
        await exchange.request(request_id=2)
        assert all("cookie" not in request.headers for request in exchange.requests)


async def test_name_and_password_of_an_address_are_sent_as_basic_credentials() -> None:
    requests: list[httpx2.Request] = []
    server = httpx2.MockTransport(lambda request: requests.append(request) or httpx2.Response(200))  # type: ignore[func-returns-value]
    await send_request(server, "GET", httpx2.URL("http://user:a%20word@here.test/mcp"), {}, None)
    assert (
        requests[0].headers["authorization"] == "Basic dXNlcjphIHdvcmQ=" and requests[0].headers["host"] == "here.test"
    )


async def test_stream_with_event_ids_is_resumed() -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            return event_stream("id: 7\nretry: 10\ndata:")
        return event_stream("data: {no json", f"id: 8\ndata: {json.dumps(OK)}")

    async with connect_to_function(respond) as exchange:
        message, _ = await exchange.request()
        assert isinstance(message, JSONRPCResponse) and message.result == {"fine": True}
        assert exchange.requests[1].headers["last-event-id"] == "7"


OTHER = b'{"jsonrpc":"2.0","id":99,"result":{}}'


@pytest.mark.parametrize("content", [b"<html>", b"", OTHER, b"data: " + OTHER + b"\n\n"])
async def test_body_without_the_answer_is_an_error_and_answers_no_other_request(content: bytes) -> None:
    kind = "text/event-stream" if content.startswith(b"data") else "application/json"
    response = httpx2.Response(200, headers={"content-type": kind}, content=content)
    async with connect_to_function(lambda _: response) as exchange:
        message, _ = await exchange.request()
        assert isinstance(message, JSONRPCError) and message.id == 1
        assert ("is not JSON-RPC" if kind.endswith("json") else "ended without an answer") in message.error.message
        assert ("id 99" in exchange.messages.unreadable) == (OTHER in content)


async def test_json_rpc_error_in_an_error_status_is_passed_on() -> None:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "no such tool", "data": [1]}}
    async with connect_to_function(lambda _: httpx2.Response(400, json=body)) as exchange:
        message, pending = await exchange.request()
        assert isinstance(message, JSONRPCError) and pending.undelivered_reason is None
        assert (message.id, message.error.code, message.error.data) == (1, -32602, [1])


@pytest.mark.parametrize(("version", "is_posted"), [("2025-11-25", True), ("2026-07-28", False)])
async def test_cancelling_posts_a_notification_only_in_handshake_versions(version: str, is_posted: bool) -> None:
    was_posted = anyio.Event()

    def respond(request: httpx2.Request) -> httpx2.Response:
        was_posted.set()
        return httpx2.Response(202)

    async with connect_to_function(respond) as exchange:
        cancel = JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params={"requestId": 1})
        await exchange.send(cancel, version)
        if is_posted:
            with anyio.fail_after(PATIENCE_S):
                await was_posted.wait()
        await exchange.send(JSONRPCNotification(jsonrpc="2.0", method="notifications/other"), version)
        assert [b"cancelled" in request.content for request in exchange.requests] == [True, False][not is_posted :]


async def test_failed_post_does_not_affect_the_next_one() -> None:
    answers = iter([httpx2.ReadError("reset"), httpx2.ConnectError("refused"), None])

    def respond(request: httpx2.Request) -> httpx2.Response:
        error = next(answers)
        if error is not None:
            raise error
        return httpx2.Response(200, json={**OK, "id": 3})

    async with connect_to_function(respond) as exchange:
        _, lost = await exchange.request(request_id=1)
        _, undelivered = await exchange.request(request_id=2)
        message, fine = await exchange.request(request_id=3)
        assert lost.lost_reason and not lost.unreachable
        assert (
            undelivered.unreachable and undelivered.undelivered_reason and "here.test" in undelivered.undelivered_reason
        )
        assert isinstance(message, JSONRPCResponse) and fine.http_status == 200
