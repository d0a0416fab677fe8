"""A connection that carries one line of JSON per message, which are bounded; and the proof of a shared token on it.

Each side proves the token when a worker connects. The token itself is never sent, and no proof works twice.

Not the library `websockets`: a request of 2,000 ids and its answer of 300 take both sides together 0.29 ms of processor
time here and 0.18 ms there, of a turn that takes a model a second. What is ours would stay, since it knows neither the
proof nor the queue: a beat or a `flush` that waits until all is with the system, and each chunk of a large message as a
sign of life, where a pong waits behind it.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from socket import gethostname
from typing import Any, NamedTuple, TypeGuard

import anyio
from anyio import to_thread
from anyio.abc import ByteStream

from gateway.line_file import MAX_LINE_BYTES

CHUNK_BYTES = 1 << 16
SENT_BYTES = 1 << 18
"""What is sent at once."""
LARGE_BYTES = 1 << 18
"""Longer lines are parsed in a thread."""
STALLED_S = 60.0
"""How long the other side may take to read each piece of what was sent."""
CLOSE_S = 1.0
BEAT_S = 1.0
"""The interval of messages that only say that a process is alive."""
ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - names
SEND_ERRORS = (OSError, TimeoutError, anyio.BrokenResourceError, anyio.ClosedResourceError)
Message = Mapping[str, Any]


class ChannelError(Exception):
    """The other side is gone, is silent, or sends what it must not."""


class ConnectionEndedError(ChannelError):
    """The connection is closed: the other side's process has ended, or the network is gone."""


class LineChannel:
    """Messages over a stream. `run_sender` must run beside `receive`."""

    def __init__(self, stream: ByteStream, *, max_bytes: int = MAX_LINE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._stream = stream
        self._received, self._searched = bytearray(), 0
        self._queued: list[bytes] = []
        self._has_queued = anyio.Event()
        self._flushing: list[anyio.Event] = []
        """Set once everything that was queued before them is sent, or never can be."""
        self._is_broken = False

    def send(self, message: Message, *lines: bytes) -> None:
        """Queues a message, and further lines that belong to it, such as that of a rollout. Raises ValueError."""
        self._queued += (require_short(encode_message(message)), *lines)
        self._has_queued.set()

    async def send_now(self, message: Message) -> None:
        """Sends a message before `run_sender` runs."""
        try:
            await self._send(encode_message(message))
        except SEND_ERRORS as error:
            raise ConnectionEndedError(f"nothing can be sent ({type(error).__name__})") from error

    async def _send(self, data: bytes) -> None:
        """Sends in pieces: a slow connection has not stalled as long as they get through."""
        for start in range(0, len(data), SENT_BYTES):
            with anyio.fail_after(STALLED_S):
                await self._stream.send(data[start : start + SENT_BYTES])

    async def flush(self) -> None:
        """Waits until everything that was queued is with the operating system, which delivers it even if this process
        is killed. Raises ChannelError if the connection is gone."""
        if not self._is_broken:
            self._flushing.append(sent := anyio.Event())
            self._has_queued.set()
            await sent.wait()
        if self._is_broken:
            raise ConnectionEndedError("the connection was closed")

    async def run_sender(self) -> None:
        """Sends what is queued until the connection ends."""
        waiting: list[anyio.Event] = []
        try:
            while True:
                await self._has_queued.wait()
                self._has_queued, data = anyio.Event(), b"".join(self._queued)
                self._queued.clear()
                waiting, self._flushing = self._flushing, []
                await self._send(data)
                for sent in waiting:
                    sent.set()
        except SEND_ERRORS as error:
            raise ConnectionEndedError(f"nothing more can be sent ({type(error).__name__})") from error
        finally:
            self._is_broken = True
            for sent in (*waiting, *self._flushing):
                sent.set()

    async def run_beats(self) -> None:
        """Sends a sign of life now and then."""
        while True:
            self.send({"t": "beat"})
            await anyio.sleep(BEAT_S)

    async def receive(self, within_s: float) -> dict[str, Any]:
        """The next message; raises ChannelError if nothing comes for so long, or it is not one."""
        line = await self.receive_line(within_s)
        return parse_message(line) if len(line) < LARGE_BYTES else await to_thread.run_sync(parse_message, line)

    async def receive_line(self, within_s: float) -> bytes:
        """The next line without its end."""
        if (end := self._received.find(b"\n", self._searched)) < 0:
            end = await self._receive_more(within_s)
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        return line

    async def _receive_more(self, within_s: float) -> int:
        """Receives until there is a whole line; returns where it ends. Each chunk is a sign of life."""
        try:
            while (end := self._received.find(b"\n", self._searched)) < 0:
                self._searched = len(self._received)
                if self._searched > self.max_bytes:
                    raise ChannelError(f"it sent a line of more than {self.max_bytes} bytes")
                with anyio.fail_after(within_s):
                    self._received += await self._stream.receive(CHUNK_BYTES)
        except TimeoutError:
            raise ChannelError(f"it gave no sign of life for {within_s:g} s") from None
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise ConnectionEndedError("the connection was closed") from None
        return end

    async def close(self) -> None:
        """Closes the connection at once."""
        with anyio.move_on_after(CLOSE_S, shield=True):
            await self._stream.aclose()


def require_short(line: bytes) -> bytes:
    """The line. Raises ValueError for one that would cost the connection."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it has {len(line):,} bytes as a message, and at most {MAX_LINE_BYTES:,} can be sent")
    return line


def encode_message(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parse_message(line: bytes) -> dict[str, Any]:
    """A line as a message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"it sent a line that is not JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise ChannelError("it sent a line that is no message")
    return message


class Address(NamedTuple):
    """Where the training process listens for workers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def for_others(self) -> Address:
        """As other machines write it: with this machine's name if it stands for all addresses of this machine."""
        return self._replace(host=gethostname()) if self.host in ALL_ADDRESSES else self

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `host:port`; raises ValueError."""
        host, separator, port = text.rpartition(":")
        if not separator or not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"should be host:port, such as 10.0.0.1:8790, not {text!r:.80}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


TOKEN_VARIABLE = "MTRL_WORKER_TOKEN"  # noqa: S105 - a name
MIN_TOKEN_LENGTH = 16
PROTOCOL = 1
ANSWER_S = 30.0
"""How long each side may take to answer."""
GREETING_BYTES = 4096
"""The longest line before both sides have proved that they know the token."""


class StrangerError(ChannelError):
    """The other side is none that this process may work with; trying again does not help."""


def prove(token: str, role: str, *nonces: str) -> str:
    """A proof of the token for one connection; `role` keeps one side from repeating the other's."""
    return hmac.new(token.encode(), "/".join((role, *nonces)).encode(), "sha256").hexdigest()


async def accept_worker(channel: LineChannel, token: str, version: str) -> dict[str, Any]:
    """Asks a worker for its proof and gives one; returns its greeting. Raises ChannelError for a stranger."""
    most, channel.max_bytes = channel.max_bytes, GREETING_BYTES
    nonce = secrets.token_hex(16)
    await channel.send_now({"protocol": PROTOCOL, "mtrl": version, "nonce": nonce})
    try:
        with anyio.fail_after(ANSWER_S):  # A stranger must not hold a connection by sending it byte by byte.
            greeting = await channel.receive(ANSWER_S)
    except TimeoutError:
        raise ChannelError(f"it did not greet within {ANSWER_S:g} s") from None
    its_nonce, proof = greeting.get("nonce"), greeting.get("proof")
    if not _is_ascii(its_nonce) or not _is_ascii(proof) or not _is_printable(greeting.get("name")):
        raise ChannelError("its greeting is not that of a worker")
    if not hmac.compare_digest(proof, prove(token, "worker", nonce, its_nonce)):
        await channel.send_now(
            {"refused": f"the token is another one; set {TOKEN_VARIABLE} as for the training process"}
        )
        raise ChannelError("it does not know the token")
    if greeting.get("mtrl") != version:
        await channel.send_now({"refused": f"the training process runs mtrl {version}; install the same"})
        raise ChannelError(f"it runs mtrl {greeting.get('mtrl')!r:.20}, not {version}")
    await channel.send_now({"proof": prove(token, "trainer", nonce, its_nonce)})
    channel.max_bytes = most
    return greeting


async def greet_trainer(channel: LineChannel, token: str, version: str, **about: Any) -> None:
    """Proves the token to the training process, and checks its proof. Raises StrangerError if one of them is refused,
    and ChannelError if the connection ends."""
    hello = await channel.receive(ANSWER_S)
    if hello.get("protocol") != PROTOCOL or not _is_ascii(hello.get("nonce")):
        raise StrangerError("no training process of this version of mtrl answers there")
    nonce = secrets.token_hex(16)
    proof = prove(token, "worker", hello["nonce"], nonce)
    await channel.send_now({**about, "mtrl": version, "nonce": nonce, "proof": proof})
    answer = await channel.receive(ANSWER_S)
    if "refused" in answer:
        raise StrangerError(str(answer["refused"])[:500])
    expected = prove(token, "trainer", hello["nonce"], nonce)
    its_proof = answer.get("proof")
    if not _is_ascii(its_proof) or not hmac.compare_digest(its_proof, expected):
        raise StrangerError("the training process does not know the token")


def _is_ascii(value: Any) -> TypeGuard[str]:
    """Whether a value is text that can be encoded: JSON may hold lone surrogates."""
    return isinstance(value, str) and value.isascii()


def _is_printable(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()
