"""A WebSocket client (RFC 6455) for JSON messages: bounded sizes, and a connection that is closed in any case."""

from __future__ import annotations

import json
import os
import ssl
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha1
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
MAX_HEAD_BYTES = 2**14
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_UNREAD = 16
"""Messages that may wait to be read."""
CLOSE_S = 2.0
"""How long the last messages may take to be sent."""
ENDS = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead)
"""How a connection ends."""
ACCEPT_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # Given by the standard.


class WebSocketError(Exception):
    """The connection could not be made, ended, or the other side broke the protocol."""


class WebSocket:
    """One open connection. A task of its own runs `run`, which answers the other side's pings at any time."""

    def __init__(self, stream: ByteStream, reader: BufferedByteReceiveStream) -> None:
        self._stream, self._reader = stream, reader
        self._writing = anyio.Lock()
        self._send_in, self._inbox = anyio.create_memory_object_stream[Any](MAX_UNREAD)
        self._end = "it was closed"
        """Why the connection ended."""

    @classmethod
    async def connect(cls, url: str, headers: Mapping[str, str], within_s: float) -> Self:
        """Connects and upgrades. Raises WebSocketError."""
        parts = urlsplit(url)
        secure = parts.scheme == "wss"
        port = parts.port or (443 if secure else 80)
        try:
            with anyio.fail_after(within_s):
                stream: ByteStream = await anyio.connect_tcp(parts.hostname or "", port)
                try:
                    if secure:
                        from anyio.streams.tls import TLSStream

                        context = ssl.create_default_context()
                        stream = await TLSStream.wrap(
                            stream, hostname=parts.hostname, ssl_context=context, standard_compatible=False
                        )
                    reader = BufferedByteReceiveStream(stream)
                    await _upgrade(stream, reader, url, headers)
                    return cls(stream, reader)
                except BaseException:
                    await anyio.aclose_forcefully(stream)
                    raise
        except TimeoutError as error:
            raise WebSocketError(f"{url} did not accept the connection within {within_s:g} s") from error
        except ENDS as error:
            raise WebSocketError(f"{url} cannot be reached: {error or type(error).__name__}") from error

    async def run(self) -> None:
        """Reads messages and answers pings until the connection ends."""
        try:
            with self._send_in:
                while True:
                    self._send_in.send_nowait(await self._receive())
        except WebSocketError as error:
            self._end = str(error)
        except anyio.WouldBlock:
            self._end = f"the server sent {MAX_UNREAD} messages that nobody had asked for"
        except ENDS as error:
            self._end = f"the connection broke ({type(error).__name__})"
        except anyio.BrokenResourceError:
            pass  # Nobody waits for messages any more.
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    async def ask(self, message: Any, within_s: float) -> Any:
        """Sends a JSON message and waits for the next one. Closed if that raises WebSocketError or TimeoutError."""
        try:
            with anyio.fail_after(within_s):
                with suppress(*ENDS):  # What the server said before it ended the connection can still be read.
                    await self._send(TEXT, json.dumps(message).encode())
                return await self._inbox.receive()
        except anyio.EndOfStream as error:
            raise WebSocketError(self._end) from error
        except BaseException:
            await anyio.aclose_forcefully(self._stream)
            raise

    async def close(self, last: Any = None) -> None:
        """Says good-bye, with a last message, and closes the connection whatever the other side does."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_S), suppress(*ENDS):
                if last is not None:
                    await self._send(TEXT, json.dumps(last).encode())
                await self._send(CLOSE, (1000).to_bytes(2, "big"))
            await anyio.aclose_forcefully(self._stream)
            self._inbox.close()

    async def _receive(self) -> Any:
        """The next message, as JSON; pings in between are answered."""
        data = bytearray()
        while True:
            final, opcode, payload = await self._read_frame(MAX_MESSAGE_BYTES - len(data))
            if opcode == PING:
                await self._send(PONG, payload)
            elif opcode == CLOSE:
                reason = payload[2:].decode("utf-8", "replace")[:200]
                raise WebSocketError(f"the server closed the connection {reason}".strip())
            elif opcode in (TEXT, BINARY, CONTINUATION):
                data += payload
                if final:
                    break
            elif opcode != PONG:
                raise WebSocketError(f"the server sent a frame of the unknown kind {opcode}")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WebSocketError(f"the server sent {bytes(data[:80])!r} instead of JSON") from error

    async def _read_frame(self, at_most: int) -> tuple[bool, int, bytes]:
        head = await self._reader.receive_exactly(2)
        length = head[1] & 0x7F
        if head[1] & 0x80 or head[0] & 0x70:
            raise WebSocketError("the server sent a frame that is masked or uses an extension")
        if length >= 126:
            length = int.from_bytes(await self._reader.receive_exactly(2 if length == 126 else 8), "big")
        if length > at_most:
            raise WebSocketError(f"the server sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        return bool(head[0] & 0x80), head[0] & 0x0F, await self._reader.receive_exactly(length) if length else b""

    async def _send(self, opcode: int, payload: bytes) -> None:
        """One frame, masked as clients have to."""
        length = len(payload)
        if length < 126:
            size = bytes([0x80 | length])
        elif length < 2**16:
            size = bytes([0x80 | 126]) + length.to_bytes(2, "big")
        else:
            size = bytes([0x80 | 127]) + length.to_bytes(8, "big")
        mask = os.urandom(4)
        key = int.from_bytes((mask * (length // 4 + 1))[:length], "big")
        masked = (int.from_bytes(payload, "big") ^ key).to_bytes(length, "big")
        async with self._writing:
            await self._stream.send(bytes([0x80 | opcode]) + size + mask + masked)


async def _upgrade(stream: ByteStream, reader: BufferedByteReceiveStream, url: str, headers: Mapping[str, str]) -> None:
    """The HTTP request that makes a WebSocket of a connection."""
    parts, key = urlsplit(url), b64encode(os.urandom(16))
    if any("\r" in text or "\n" in text for pair in headers.items() for text in pair):
        raise WebSocketError("a header contains a line break")
    lines = [
        f"GET {parts.path or '/'}{'?' + parts.query if parts.query else ''} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key.decode()}",
        "Sec-WebSocket-Version: 13",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    await stream.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    try:
        head = (await reader.receive_until(b"\r\n\r\n", MAX_HEAD_BYTES)).decode("latin-1").split("\r\n")
    except anyio.DelimiterNotFound as error:
        raise WebSocketError(f"{url} did not answer as an HTTP server") from error
    answered = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    status = head[0].split(" ", 2)[1:2]
    expected = b64encode(sha1(key + ACCEPT_SUFFIX, usedforsecurity=False).digest()).decode()
    if status != ["101"] or answered.get("sec-websocket-accept") != expected:
        raise WebSocketError(f"{url} is no WebSocket: it answered {head[0][:80]!r}")
