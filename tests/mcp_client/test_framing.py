"""Framing: messages do not depend on chunk borders, and buffers stay bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from gateway.mcp_client.framing import EventParser, LineSplitter, OversizedLine, ServerSentEvent
from gateway.mcp_client.messages import UnreadableMessageError, find_request_id, parse_messages

chunks = st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\r", b"")) | st.just(b"\n"), max_size=20)


@given(chunks, st.integers(0, 10) | st.just(10_000))
def test_lines_are_whole_whatever_the_chunk_borders_or_oversized(parts: list[bytes], max_bytes: int) -> None:
    lines = LineSplitter(max_bytes)
    parsed = [line for part in parts for line in lines.feed(part)]
    whole = [None if len(line) > max_bytes else line for line in b"".join(parts).split(b"\n")[:-1]]
    assert [None if isinstance(line, OversizedLine) else line for line in parsed] == whole


def test_endless_line_takes_bounded_memory() -> None:
    lines = LineSplitter(1000)
    assert not any(lines.feed(b"x" * 1000) for _ in range(100)) and len(lines._kept) < 2000


@given(st.lists(st.text(alphabet="abc :", min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 7))
def test_events_do_not_depend_on_chunk_borders(data: list[str], step: int) -> None:
    wire = "".join(
        f"event: message\nid: {request_id}\ndata: {text}\n\n" for request_id, text in enumerate(data)
    ).encode()
    events = EventParser(10_000)
    parsed = [event for offset in range(0, len(wire), step) for event in events.feed(wire[offset : offset + step])]
    assert parsed == [
        ServerSentEvent("message", text.encode(), str(request_id)) for request_id, text in enumerate(data)
    ]


@given(st.sampled_from(["\n", "\r", "\r\n"]), st.integers(1, 7))
def test_lines_of_events_end_with_any_line_end(end: str, step: int) -> None:
    wire = "\ufeff" + end.join(["data: a", "data: b", "", ": comment", "retry: 1500", "id: 1", "data: c", "", ""])
    data, events = wire.encode(), EventParser(10_000)
    parsed = [event for at in range(0, len(data), step) for event in events.feed(data[at : at + step])]
    assert parsed == [ServerSentEvent("message", b"a\nb", ""), ServerSentEvent("message", b"c", "1")]
    assert events.retry_s == 1.5


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"jsonrpc":"2.0","id":1,"method":"ping"}', JSONRPCRequest),
        ('{"jsonrpc":"2.0","method":"notifications/x"}', JSONRPCNotification),
        ('{"jsonrpc":"2.0","id":"a","result":{}}', JSONRPCResponse),
        ('{"id":1,"result":{}}', JSONRPCResponse),
        (r'{"id":1,"result":{"\ud800":1}}', JSONRPCResponse),
        ('{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"m"}}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":null,"error":{"code":-1,"message":"m"}}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":1,"result":[1]}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":1,"error":"just words"}', JSONRPCError),
        ('{"jsonrpc":"2.0","id":1}', JSONRPCError),
    ],
)
def test_json_is_parsed_as_the_message_it_is_meant_to_be(text: str, kind: type) -> None:
    batch = f'[{text}, 3, null, {{}}, {{"id": true, "method": "m"}}, {text}]'
    for data, count in ((text, 1), (batch, 3)):
        messages = parse_messages(data.encode())
        assert len(messages) == count and type(messages[0]) is type(messages[-1]) is kind
    assert parse_messages(b"INFO: {") == []


@pytest.mark.parametrize(
    ("data", "problem", "request_id"),
    [
        (b"[" * 9999, "nested deeper", None),
        (b'{"jsonrpc":"2.0","id":7,"result":{"a":"\xff"}}', "not UTF-8", 7),
        (b'{"result":{"id":1,"a":' + b"[" * 300 + b"]" * 300 + b'},"id":"x"}', "nested deeper than 200", "x"),
        (b'{"id":3,"result":{"a":' + b"9" * 5000 + b"}}", "not usable JSON", 3),
        (b'{"method":"m","id" : 4 , "result', "not usable JSON", 4),
        (b'{"a":{"id":4},"b":{"id":5},"c":', "not usable JSON", None),
        (b"[" + b"{}," * 1000 + b"{}]", "a batch of more than 1000", None),
    ],
)
def test_unreadable_message_names_its_request(data: bytes, problem: str, request_id: str | int | None) -> None:
    with pytest.raises(UnreadableMessageError, match=problem) as error_info:
        parse_messages(data)
    assert error_info.value.request_id == request_id


@pytest.mark.parametrize("request_id", [7, "seven"])
def test_request_id_of_an_oversized_answer_is_found(request_id: int | str) -> None:
    for message in (
        {"jsonrpc": "2.0", "id": request_id, "result": {"text": "x" * 1000}},
        {"result": {"text": "x" * 1000}, "id": request_id, "jsonrpc": "2.0"},
        {"jsonrpc": "2.0", "result": {"text": "x" * 1000}, "id": request_id},
    ):
        for separators in ((",", ":"), (", ", ": ")):
            data = json.dumps(message, separators=separators).encode()
            assert find_request_id(data[:256], data[-256:]) == request_id
    assert find_request_id(b'{"jsonrpc":"2.0","result":{"id":7', b"xxxx") is None
