"""The messages between workers and the training process: nothing is rounded or lost, and what is broken is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import date
from typing import Any

import anyio
import pytest

from gateway.types import Audio, Image
from gateway.types import Task as SessionTask
from mtrl_plugins.workers.line_channel import (
    SENT_BYTES,
    ChannelError,
    LineChannel,
    accept_worker,
    encode_message,
    parse_message,
)
from mtrl_plugins.workers.messages import (
    MAX_BLOB_BYTES,
    Blobs,
    find_unsendable_values,
    generation_from_plain,
    generation_to_plain,
    pack_plain,
    request_from_plain,
    request_to_plain,
    task_from_plain,
    task_to_plain,
)
from tests.virtual_clock import VIRTUAL_CLOCK
from trainer.engine.base import Generation, Sampling
from trainer.rollout.task import Task
from trainer.storage.rollout_line import pack_array

IMAGE = Image(b"\x89PNG one")
TASK = Task(
    "t",
    ({"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "What? \ud800"}]},),
    truth=("a", 1.5, None),
    session_task=SessionTask(
        id="t", tools=("one",), create={"one": {"sound": Audio(b"aa")}}, feedback="gsm8k", state="one", hash_state=True
    ),
    columns={"$odd": b"bytes", "n": [1, {2: "two"}], "big": 10**30, "kind": "x"},
    location="rows.jsonl:3",
)


class Sides:
    """The blobs of both sides, and what passed between them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.theirs = Blobs(self.messages.append, 7)
        self.ours = Blobs(self.send, 7)

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.theirs.receive(json.loads(json.dumps(message)))


def test_task_comes_back_as_it_was_and_each_blob_is_sent_once() -> None:
    sides = Sides()
    plain = json.loads(json.dumps(task_to_plain(TASK, sides.ours)))
    assert task_from_plain(plain, sides.theirs) == TASK
    assert len(sides.messages) == 3
    sides.theirs.put(IMAGE.data)
    assert len(sides.messages) == 3  # The other side has it.


def test_every_field_of_a_session_task_is_sent() -> None:
    sent = task_to_plain(TASK, Sides().ours)["session"]
    names = {field.name for field in fields(SessionTask)}
    assert set(sent) == names - {"rollout", "session_id"}  # Its player names both.


def test_columns_that_cannot_be_sent_are_told_at_the_start_by_row() -> None:
    columns: list[dict[str, Any]] = [{"a": 1}, {"when": [{"at": date(2026, 1, 2)}], "a": 1}, {"when": [0, {"at": {1}}]}]
    rows = [Task(f"{n}", (), columns=row, location=f"rows.parquet:{n}") for n, row in enumerate(columns)]
    (mistake,) = find_unsendable_values(rows)
    assert str(mistake.file) == "rows.parquet:1" and "`rollout.workers`" in (mistake.remedy or "")
    assert "columns.when[].at is a date, which cannot be sent to a rollout worker (2 rows)" in mistake.problem


def test_generation_keeps_every_bit_and_the_versions_of_its_tokens() -> None:
    generation = Generation((5, 1, 2**30), (-0.1, -1e-300, -1 / 3), "length", 4, 2, ((2, 1), (3, 1)), 9)
    assert generation_from_plain(json.loads(json.dumps(generation_to_plain(generation)))) == generation


def test_request_keeps_sampling_and_images() -> None:
    sides, sampling = Sides(), Sampling(7, 0.3, 0.9, 5, (1, 2), ("stop",), (9,), 2**55)
    plain = json.loads(json.dumps(request_to_plain((1, 2, 3), sampling, [IMAGE], sides.ours)))
    assert request_from_plain(plain, sides.theirs, 100) == ((1, 2, 3), sampling, (IMAGE,))


@pytest.mark.parametrize(
    "change",
    [
        {"ids": "plain:AAAA"},
        {"ids": "deflate:AAAA"},
        {"ids": pack_array((1,) * 99, "i")},
        {"ids": [1]},
        {"ids": pack_plain((99, 100), "i")},
        {"ids": "plain://///w=="},
        {"sampling": ["x"] * 9},
        {"images": [["0" * 64, "image/png"]]},
    ],
)
def test_broken_request_is_refused(change: dict[str, Any]) -> None:
    sides = Sides()
    plain = request_to_plain((1,), Sampling(), [], sides.ours) | change
    with pytest.raises((ValueError, TypeError, AttributeError)):
        request_from_plain(plain, sides.theirs, 100)


def test_damaged_and_too_many_blobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides()
    with pytest.raises(ValueError, match="damaged"):
        sides.theirs.receive({"data": "%%%"})
    monkeypatch.setattr("mtrl_plugins.workers.messages.MAX_BLOB_BYTES", 10)
    sides.ours.put(b"12345678")
    with pytest.raises(ValueError, match="more than 10 bytes"):
        sides.ours.put(b"123")
    assert MAX_BLOB_BYTES > 10


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_line_that_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ChannelError):
        parse_message(line)


class OneWay:
    """A stream that receives these chunks, and keeps what is sent."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks, self.sent = list(chunks), bytearray()

    async def receive(self, most: int) -> bytes:
        if not self.chunks:
            await anyio.sleep_forever()
        return self.chunks.pop(0)

    async def send(self, data: bytes) -> None:
        self.sent += data

    async def aclose(self) -> None:
        pass


async def test_endless_line_is_refused() -> None:
    channel = LineChannel(OneWay(*[b"x" * 60] * 3), max_bytes=100)  # type: ignore[arg-type]
    with pytest.raises(ChannelError, match="more than 100 bytes"):
        await channel.receive(60)


class SlowStream(OneWay):
    """A stream that takes most of a minute for each piece."""

    async def receive(self, most: int) -> bytes:
        await anyio.sleep(50)
        return await super().receive(most)

    async def send(self, data: bytes) -> None:
        await anyio.sleep(50 * len(data) / SENT_BYTES)
        await super().send(data)


on_virtual_clock = pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", VIRTUAL_CLOCK), id="virtual")])


@on_virtual_clock
async def test_slow_connection_that_moves_has_not_stalled() -> None:
    stream = SlowStream(b'{"a"', b":", b"1}\n")
    channel = LineChannel(stream)  # type: ignore[arg-type]
    assert await channel.receive(60) == {"a": 1}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run_sender)
        channel.send({"t": "x" * (1 << 20)})
        await channel.flush()
        tasks.cancel_scope.cancel()
    assert len(stream.sent) > 1 << 20


@on_virtual_clock
async def test_stranger_who_greets_byte_by_byte_is_refused() -> None:
    channel = LineChannel(SlowStream(*[b"x"] * 9))  # type: ignore[arg-type]
    with pytest.raises(ChannelError, match="did not greet within 30 s"):
        await accept_worker(channel, "a token", "1")


@pytest.mark.parametrize("change", [{"nonce": "\ud800"}, {"proof": "\ud800"}, {"name": "\ud800"}, {"name": 1}])
async def test_greeting_that_cannot_be_read_is_refused(change: dict[str, Any]) -> None:
    greeting = {"name": "x", "nonce": "a", "proof": "b"} | change
    channel = LineChannel(OneWay(encode_message(greeting)))  # type: ignore[arg-type]
    with pytest.raises(ChannelError, match="not that of a worker"):
        await accept_worker(channel, "a token", "1")
