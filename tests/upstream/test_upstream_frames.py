"""Bytes become messages whatever way they are cut up, and never is more held than allowed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from gateway.upstream.frames import addressee, frame, messages
from gateway.upstream.lines import Event, Events, Lines, TooLong

chunks = st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\r", b"")) | st.just(b"\n"), max_size=20)


@given(chunks)
def test_lines_are_the_same_however_the_bytes_are_cut(parts: list[bytes]) -> None:
    lines = Lines(10_000)
    found = [line for part in parts for line in lines.feed(part)]
    assert found == b"".join(parts).split(b"\n")[:-1]


@given(chunks, st.integers(0, 10))
def test_a_line_is_too_long_exactly_when_it_is_longer_than_the_most(parts: list[bytes], most: int) -> None:
    lines = Lines(most)
    found = [line for part in parts for line in lines.feed(part)]
    whole = b"".join(parts).split(b"\n")[:-1]
    assert [isinstance(line, TooLong) for line in found] == [len(line) > most for line in whole]


def test_what_is_held_of_an_endless_line_stays_small() -> None:
    lines = Lines(1000)
    for _ in range(5000):
        assert lines.feed(b"x" * 1000) == []
    assert sum(len(chunk) for chunk in lines._chunks) < 2000


@given(st.lists(st.text(alphabet="abc :", min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 7))
def test_events_are_the_same_however_the_bytes_are_cut(data: list[str], step: int) -> None:
    wire = "".join(f"event: message\nid: {number}\ndata: {one}\n\n" for number, one in enumerate(data)).encode()
    events = Events(10_000)
    found = [event for at in range(0, len(wire), step) for event in events.feed(wire[at : at + step])]
    assert found == [Event("message", one.encode(), str(number)) for number, one in enumerate(data)]


def test_an_event_has_several_lines_comments_and_a_pause() -> None:
    events = Events(100)
    wire = b": hello\r\nretry: 1500\r\ndata: one\r\ndata:two\r\n\r\nevent: endpoint\r\ndata: /x\r\n\r\n\r\n"
    assert events.feed(wire) == [Event("message", b"one\ntwo", ""), Event("endpoint", b"/x", "")]
    assert events.retry_s == 1.5


def test_an_event_of_many_lines_is_bounded_as_a_whole() -> None:
    (event,) = Events(10).feed(b"data: 123456\ndata: 123456\n\n")
    assert isinstance(event.data, TooLong)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"jsonrpc":"2.0","id":1,"method":"ping"}', JSONRPCRequest),
        ('{"jsonrpc":"2.0","method":"notifications/x"}', JSONRPCNotification),
        ('{"jsonrpc":"2.0","id":"a","result":{}}', JSONRPCResponse),
        ('{"id":1,"result":{}}', JSONRPCResponse),
        ('{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"m"}}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":null,"error":{"code":-1,"message":"m"}}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":1,"result":[1]}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":1,"error":"just words"}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":1}', JSONRPCError),
    ],
)
def test_a_frame_is_read_as_what_it_is_meant_to_be(text: str, kind: type) -> None:
    (message,) = messages(text)
    assert type(message) is kind


@pytest.mark.parametrize(
    "text", ["", "hello", "{", "3", '"a"', "[1, null]", "{}", '{"id": true, "result": {}}', "[" * 9999]
)
def test_noise_is_no_message(text: str) -> None:
    assert messages(text) == []


def test_a_batch_is_several_messages() -> None:
    assert len(messages('[{"id":1,"result":{}},{"method":"m"}]')) == 2


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), max_size=4))
def test_a_frame_written_is_one_line_that_reads_as_the_same(params: dict[str, object]) -> None:
    request = JSONRPCRequest(jsonrpc="2.0", id=7, method="m", params=params)
    written = frame(request)
    assert b"\n" not in written and messages(written) == [request]


@pytest.mark.parametrize("number", [7, "seven"])
def test_an_answer_too_large_to_be_read_still_finds_its_call(number: int | str) -> None:
    for whole in (
        {"jsonrpc": "2.0", "id": number, "result": {"text": "x" * 1000}},
        {"result": {"text": "x" * 1000}, "id": number, "jsonrpc": "2.0"},
        {"jsonrpc": "2.0", "result": {"text": "x" * 1000}, "id": number},
    ):
        for separators in ((",", ":"), (", ", ": ")):
            data = json.dumps(whole, separators=separators).encode()
            assert addressee(data[:256], data[-256:]) == number
    assert addressee(b'{"jsonrpc":"2.0","result":{"id":7', b"xxxx") is None
