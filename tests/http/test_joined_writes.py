"""The head and the body of a response leave with one system call, those of a turn together; nothing stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.http.bounded_protocol import JoinedWrites, WriteTurn


class _Transport:
    """A transport that notes what it is told to send."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_closing = lambda: False
        self.abort = lambda: None

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.sent.append("closed")


def _make(turn: WriteTurn | None = None) -> tuple[JoinedWrites, _Transport]:
    transport = _Transport()
    return JoinedWrites(transport, asyncio.get_running_loop(), turn or WriteTurn()), transport


async def test_head_and_body_are_sent_together_and_a_head_alone_in_the_next_turn() -> None:
    joined, transport = _make()
    joined.write(b"head")
    joined.write(b"body")
    await asyncio.sleep(0)
    assert transport.sent == [b"headbody"]
    joined.write(b"head")
    assert transport.sent == [b"headbody"]
    await asyncio.sleep(0)
    joined.write(b"piece")
    await asyncio.sleep(0)
    assert transport.sent == [b"headbody", b"head", b"piece"]


async def test_what_waits_is_sent_before_the_connection_closes() -> None:
    joined, transport = _make()
    joined.write(b"head")
    joined.close()
    await asyncio.sleep(0)
    assert transport.sent == [b"head", "closed"]


async def test_nothing_is_sent_on_a_connection_that_is_closing() -> None:
    joined, transport = _make()
    joined.write(b"head")
    transport.is_closing = lambda: True
    await asyncio.sleep(0)
    assert transport.sent == []


async def test_responses_of_one_turn_are_sent_together_and_many_do_not_wait_for_all() -> None:
    turn = WriteTurn()
    connections = [_make(turn) for _ in range(20)]
    for joined, _ in connections:
        joined.write(b"whole")
    assert [len(transport.sent) for _, transport in connections] == [1] * 16 + [0] * 4
    await asyncio.sleep(0)
    assert all(transport.sent == [b"whole"] for _, transport in connections)
