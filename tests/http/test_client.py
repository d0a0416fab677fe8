"""The client's own promises: what a broken line means, what a cancelled call does, and what is shared."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketStream
from pydantic import SecretStr

from gateway.client import RemoteGateway
from gateway.errors import GatewayError, SessionError, TooManySessions, Unavailable
from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.native.function import FunctionTool
from gateway.types import Outcome, Task, ToolCall
from tests.doors.kit import call
from tests.http.rooms import Watched, rooms
from tests.served import served, until

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
async def test_a_call_without_an_answer_has_an_outcome(then: Then, outcome: Outcome) -> None:
    with anyio.fail_after(10):
        async with line(then) as url, RemoteGateway(url, timeout_s=0.5) as gateway, gateway.open() as session:
            results = await session.calls([call("add"), call("add")])
            heard = await session.feedback([])
    assert [result.outcome for result in results] == [outcome] * 2
    assert heard.outcome is outcome and heard.reason and heard.score == 0.0
    assert session.rewards == []


async def test_a_call_that_cannot_be_sent_is_unavailable() -> None:
    async with served(lambda: Gateway(rooms())) as at:
        gateway = await RemoteGateway(at.url).__aenter__()
        session = await gateway.begin(Task())
    with anyio.fail_after(10):
        result = await session.call(call("add", '{"a": 1}'))
        await session.close()
        await gateway.__aexit__(None, None, None)
    assert result.outcome is Outcome.UNAVAILABLE and "cannot be reached" in (result.reason or "")


async def test_a_gateway_that_is_not_there_cannot_be_entered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with anyio.fail_after(10), pytest.raises(Unavailable, match=f"127.0.0.1:{port} cannot be reached"):
        async with RemoteGateway(f"http://127.0.0.1:{port}"):
            pass


async def test_a_client_must_be_entered() -> None:
    with pytest.raises(GatewayError, match="not entered"):
        await RemoteGateway("http://127.0.0.1:1").begin(Task())


async def test_cancelling_a_call_cancels_it_on_the_other_side() -> None:
    watched = Watched()
    async with (
        served(lambda: Gateway(rooms(FunctionTool(watched.hang)))) as at,
        RemoteGateway(at.url) as gateway,
        gateway.open() as session,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.call, call("hang"))
            await until(watched.started.is_set)
            tasks.cancel_scope.cancel()
        await until(watched.cancelled.is_set)
        assert (await session.call(call("add", '{"a": 1}'))).text == "1"


async def test_a_cancelled_rollout_closes_its_session() -> None:
    watched = Watched()
    async with served(lambda: Gateway(rooms(FunctionTool(watched.hang)))) as at, RemoteGateway(at.url) as gateway:

        async def roll() -> None:
            async with gateway.open() as session:
                await session.call(call("hang"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(roll)
            await until(watched.started.is_set)
            assert len(at.gateway.sessions) == 1
            tasks.cancel_scope.cancel()
        assert not at.gateway.sessions


async def test_an_expired_session_says_so() -> None:
    async with (
        served(lambda: Gateway(rooms())) as at,
        RemoteGateway(at.url) as gateway,
        gateway.open(Task(ttl_s=0.05)) as session,
    ):
        await until(lambda: session.id not in at.gateway.sessions)
        with pytest.raises(SessionError, match="no such session"):
            await session.call(call("add", '{"a": 1}'))


async def test_a_call_too_long_to_send_is_the_policys_mistake() -> None:
    settings = Settings(port=0, body_bytes=1000)
    async with (
        served(lambda: Gateway(rooms()), settings) as at,
        RemoteGateway(at.url) as gateway,
        gateway.open() as session,
    ):
        result = await session.call(call("add", "9" * 2000))
        assert result.outcome is Outcome.INVALID and "1000 bytes" in result.text
        assert (await session.call(call("add", '{"a": 1}'))).text == "1"


async def test_a_token_is_sent_and_a_missing_one_is_told_of() -> None:
    settings = Settings(port=0, token=SecretStr("s3cret"))
    async with served(lambda: Gateway(rooms()), settings) as at:
        with pytest.raises(GatewayError, match="token is missing or wrong"):
            async with RemoteGateway(at.url):
                pass
        async with RemoteGateway(at.url + "/", token="s3cret") as gateway, gateway.open() as session:
            assert (await session.call(call("add", '{"a": 1}'))).text == "1"
            assert "s3cret" not in repr(gateway.__dict__["_http"])


async def test_a_full_gateway_is_told_apart_from_a_broken_one() -> None:
    async with (
        served(lambda: Gateway(rooms(), most_sessions=1)) as at,
        RemoteGateway(at.url) as gateway,
        gateway.open(),
    ):
        with pytest.raises(TooManySessions, match="1 sessions are open"):
            await gateway.begin(Task())


async def test_refreshing_sees_what_was_added() -> None:
    async with served(lambda: Gateway(rooms())) as at, RemoteGateway(at.url) as gateway:
        before = gateway.specs
        await gateway.refresh()
        assert gateway.specs == before == tuple(at.gateway.specs)


async def test_many_calls_in_flight_lose_nothing_and_double_nothing() -> None:
    async with served(lambda: Gateway(rooms())) as at, RemoteGateway(at.url) as gateway:
        seen: list[str] = []

        async def roll(place: int) -> None:
            async with gateway.open() as session:
                calls = [ToolCall(f"{place}.{turn}", "add", f'{{"a": {place * 4 + turn}}}') for turn in range(4)]
                async with anyio.create_task_group() as turns:
                    for one in calls:
                        turns.start_soon(answer, session, one)

        async def answer(session: object, one: ToolCall) -> None:
            seen.append((await session.call(one)).text)  # type: ignore[attr-defined]

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for place in range(100):
                    tasks.start_soon(roll, place)
        assert sorted(seen, key=int) == [str(number) for number in range(400)]
        assert not at.gateway.sessions


async def test_a_token_that_cannot_be_sent_is_not_told() -> None:
    async with served(lambda: Gateway(rooms())) as at:
        with pytest.raises(Unavailable, match="LocalProtocolError") as refused:
            async with RemoteGateway(at.url, token="hunter2\n"):
                pass
    assert "hunter2" not in str(refused.value)
