"""Tests of `RemoteGateway`: connection failures, cancellation, tokens and concurrency."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream
from pydantic import SecretStr

from gateway.client import RemoteGateway
from gateway.errors import GatewayError, SessionError, TooManySessions, Unavailable
from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.types import Feedback, Outcome, Task
from gateway.wire import feedback_to_json
from tests.http.api_client import HangingTool, http_sources
from tests.live_server import LiveServer, live_server_async
from tests.toolset_conformance.sample_tools import make_call
from tests.waiting import PATIENCE_S, wait_until

LISTED = b'{"object":"list","data":[]}'
BEGUN = b'{"id":"s","tools":[],"feedback":null,"expires_at":null}'
CLOSED = b'{"id":"s","rewards":[]}'
Then = Callable[[SocketStream], Awaitable[None]]


@asynccontextmanager
async def line(then: Then) -> AsyncIterator[str]:
    """A server that opens a session as it should, and then does `then` with a call."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            while True:
                try:
                    request = await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    return
                if b"/calls" in request or b"/feedback" in request:
                    return await then(stream)
                body = CLOSED if request.startswith(b"DELETE") else LISTED if b"/v1/tools" in request else BEGUN
                await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


async def hang_up(stream: SocketStream) -> None:
    """Leaves the call without an answer."""


async def refuse(stream: SocketStream) -> None:
    await stream.send(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}")


async def stay_silent(stream: SocketStream) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("then", "outcome"),
    [(hang_up, Outcome.UNKNOWN), (refuse, Outcome.UNKNOWN), (stay_silent, Outcome.TIMEOUT)],
    ids=["hangs up", "fails", "is silent"],
)
async def test_failed_response_becomes_an_outcome(then: Then, outcome: Outcome) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with line(then) as url, RemoteGateway(url) as gateway, gateway.open() as session:
            if then is stay_silent:
                gateway.__dict__["_http"].timeout = 0.5  # From now on: opening should simply work.
            results = await session.calls([make_call("add"), make_call("add")])
            feedback = await session.feedback([])
    assert [result.outcome for result in results] == [outcome] * 2
    assert feedback.outcome is outcome and feedback.reason and feedback.score == 0.0
    assert session.rewards == []


async def judge_is_away(stream: SocketStream) -> None:
    lost = Feedback((), score=1.0, outcome=Outcome.UNAVAILABLE, reason="the judge is away")
    body = json.dumps(feedback_to_json(lost)).encode()
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def test_feedback_that_the_infrastructure_could_not_give_is_no_reward() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with line(judge_is_away) as url, RemoteGateway(url) as gateway, gateway.open() as session:
            assert (await session.feedback([])).outcome is Outcome.UNAVAILABLE
            assert session.rewards == []


async def test_entering_an_unreachable_gateway_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with anyio.fail_after(PATIENCE_S), pytest.raises(Unavailable, match=f"127.0.0.1:{port} cannot be reached"):
        async with RemoteGateway(f"http://127.0.0.1:{port}"):
            pass


async def test_what_could_not_be_sent_was_not_done_and_errors_are_those_of_a_gateway_in_this_process() -> None:
    async with live_server_async(lambda: Gateway(http_sources(), max_sessions=1)) as server:
        gateway = await RemoteGateway(server.url).__aenter__()
        session = await gateway.begin(Task())
        with pytest.raises(TooManySessions, match="1 sessions are open"):
            await gateway.begin(Task())
        with pytest.raises(Unavailable, match="LocalProtocolError") as refused:
            await RemoteGateway(server.url, token="hunter2\n").__aenter__()
    assert "hunter2" not in str(refused.value)
    with anyio.fail_after(PATIENCE_S):
        assert (await session.call(make_call("add", '{"a": 1}'))).outcome is Outcome.UNAVAILABLE
        await session.close()
        await gateway.__aexit__(None, None, None)
    with pytest.raises(GatewayError, match="not entered"):
        await gateway.begin(Task())


async def test_opening_a_session_waits_for_a_gateway_that_is_started_again() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Settings(port=port)
    names: list[str] = []

    async def play(remote: RemoteGateway) -> None:
        async with remote.open(Task("t")) as session:
            names.extend(spec.name for spec in session.specs)

    async with anyio.create_task_group() as playing:
        async with live_server_async(lambda: Gateway(http_sources()), settings) as server:
            remote = RemoteGateway(server.url, reconnect_s=PATIENCE_S)
            await remote.__aenter__()
        playing.start_soon(play, remote)
        await anyio.lowlevel.checkpoint()
        async with live_server_async(lambda: Gateway(http_sources()), settings):
            await wait_until(lambda: bool(names))
        await remote.__aexit__(None, None, None)


async def test_cancelled_calls_and_rollouts_end_on_the_server(server: LiveServer, hanging: HangingTool) -> None:
    async with RemoteGateway(server.url) as gateway, gateway.open() as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.call, make_call("hang"))
            await wait_until(hanging.started.is_set)
            tasks.cancel_scope.cancel()
        await wait_until(hanging.cancelled.is_set)
        assert (await session.call(make_call("add", '{"a": 1}'))).text == "1"

        rolling = anyio.Event()

        async def roll() -> None:
            async with gateway.open() as other:
                assert other.id in server.gateway.sessions
                rolling.set()
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(roll)
            await rolling.wait()
            tasks.cancel_scope.cancel()
        assert [*server.gateway.sessions] == [session.id]


@asynccontextmanager
async def keeping_answers_to_openings(url: str, instead: bytes | None = None) -> AsyncIterator[str]:
    """A way to the server on which no answer to an opening arrives, and from which it learns of no lost client; the
    client gets this `instead`, is hung up on if that is empty, or waits."""

    async def pass_on(source: SocketStream, target: SocketStream, keeps: bool, opening: list[bool]) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                if not keeps:
                    opening.append(data.startswith(b"POST /v1/sessions "))
                elif opening[-1]:
                    if instead:
                        await target.send(instead)
                    elif instead is not None:
                        await target.aclose()
                    continue
                await target.send(data)

    async def serve(client: SocketStream) -> None:
        server, opening = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])), [False]
        async with server, client, anyio.create_task_group() as tasks:
            tasks.start_soon(pass_on, client, server, False, opening)
            tasks.start_soon(pass_on, server, client, True, opening)
            await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("instead", "error"),
    [
        (b"", "RemoteProtocolError"),
        (b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 4\r\n\r\n<h1>", "status 504"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<h1>", "is no JSON"),
    ],
    ids=["lost", "a proxy's error", "a proxy's page"],
)
async def test_session_whose_opening_was_not_answered_is_closed(server: LiveServer, instead: bytes, error: str) -> None:
    async with keeping_answers_to_openings(server.url, instead) as url, RemoteGateway(url) as gateway:
        with pytest.raises(GatewayError, match=error):
            await gateway.begin(Task())
        assert not server.gateway.sessions


async def test_session_whose_opening_was_cancelled_is_closed(server: LiveServer) -> None:
    async with keeping_answers_to_openings(server.url) as url, RemoteGateway(url) as gateway:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gateway.begin, Task())
            await wait_until(lambda: bool(server.gateway.sessions))
            tasks.cancel_scope.cancel()
        assert not server.gateway.sessions


async def test_cancelled_opening_with_the_id_of_an_open_session_leaves_that_alone(server: LiveServer) -> None:
    async with RemoteGateway(server.url) as gateway, gateway.open() as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gateway.begin, Task(session_id=session.id))
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert (await session.call(make_call("add", '{"a": 1}'))).text == "1"


class SlowGateway(Gateway):
    """A gateway whose sessions are opened when a test says so."""

    is_opening = may_open = False

    async def _open_source(self, *args: Any) -> None:
        self.is_opening = True
        await wait_until(lambda: self.may_open)
        await super()._open_source(*args)

    def has_none(self) -> bool:
        return not self._taken_ids


async def test_cancelled_opening_that_is_under_way_is_ended_whoever_is_between() -> None:
    async with live_server_async(lambda: SlowGateway(http_sources())) as server:
        slow = cast("SlowGateway", server.gateway)
        async with keeping_answers_to_openings(server.url) as url, RemoteGateway(url) as gateway:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(gateway.begin, Task())
                await wait_until(lambda: slow.is_opening)
                tasks.cancel_scope.cancel()
            await wait_until(slow.has_none)


async def test_session_whose_client_dies_while_it_is_opened_is_closed() -> None:
    async with live_server_async(lambda: SlowGateway(http_sources())) as server:
        slow = cast("SlowGateway", server.gateway)
        async with await anyio.connect_tcp("127.0.0.1", int(server.url.rpartition(":")[2])) as client:
            head = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 2"
            await client.send(b"POST /v1/sessions HTTP/1.1\r\n" + head + b"\r\n\r\n{}")
            await wait_until(lambda: slow.is_opening)
        slow.may_open = True  # Sooner than its client is watched.
        await wait_until(slow.has_none)


async def test_id_of_an_open_session_opens_no_other(server: LiveServer) -> None:
    async with RemoteGateway(server.url) as gateway, gateway.open() as session:
        with pytest.raises(SessionError, match="a session with this id is open"):
            await gateway.begin(Task(session_id=session.id))
        with pytest.raises(SessionError, match="should match pattern"):
            await gateway.begin(Task(session_id="1"))
        assert (await session.call(make_call("add", '{"a": 1}'))).text == "1"


async def test_expired_session_raises_session_error(server: LiveServer) -> None:
    async with RemoteGateway(server.url) as gateway, gateway.open(Task(ttl_s=0.05)) as session:
        await wait_until(lambda: session.id not in server.gateway.sessions)
        with pytest.raises(SessionError, match="no such session"):
            await session.call(make_call("add", '{"a": 1}'))


async def test_call_larger_than_the_body_limit_is_invalid() -> None:
    settings = Settings(port=0, body_bytes=1000)
    async with (
        live_server_async(lambda: Gateway(http_sources()), settings) as server,
        RemoteGateway(server.url) as gateway,
        gateway.open() as session,
    ):
        result = await session.call(make_call("add", "9" * 2000))
        assert result.outcome is Outcome.INVALID and "1000 bytes" in result.text
        assert (await session.call(make_call("add", '{"a": 1}'))).text == "1"


async def test_token_is_sent_and_a_missing_one_is_reported() -> None:
    settings = Settings(port=0, token=SecretStr("s3cret"))
    async with live_server_async(lambda: Gateway(http_sources()), settings) as server:
        with pytest.raises(GatewayError, match="token is missing or wrong"):
            async with RemoteGateway(server.url):
                pass
        async with RemoteGateway(server.url + "/", token="s3cret") as gateway, gateway.open() as session:
            assert (await session.call(make_call("add", '{"a": 1}'))).text == "1"
            assert "s3cret" not in repr(gateway.__dict__["_http"])
