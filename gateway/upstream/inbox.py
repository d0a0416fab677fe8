"""What a server says over HTTP keeps the name of the call that it answers, wherever it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context as Variables
from contextvars import copy_context
from types import TracebackType
from typing import Self

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCResponse

from gateway.upstream.frames import addressee, failure, messages
from gateway.upstream.lines import Event, TooLong

Named = tuple[Variables, SessionMessage | Exception]


class Inbox:
    """The reading end of a connection, as the SDK's dispatcher wants it: it asks for the sender's context."""

    def __init__(self, stream: MemoryObjectReceiveStream[Named]) -> None:
        self._stream = stream
        self.last_context: Variables | None = None

    async def receive(self) -> SessionMessage | Exception:
        self.last_context, item = await self._stream.receive()
        return item

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Slot:
    """The other end: where a transport puts what it has read."""

    def __init__(self, stream: MemoryObjectSendStream[Named], most_bytes: int) -> None:
        self._stream, self.most_bytes = stream, most_bytes

    async def put(self, message: JSONRPCMessage | Exception) -> None:
        """Drops it where nobody reads any more."""
        item = message if isinstance(message, Exception) else SessionMessage(message)
        try:
            await self._stream.send((copy_context(), item))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def put_frame(self, data: bytes, asked: str | int | None = None) -> bool:
        """Whether it held the answer to `asked`; an error that names no request is meant for that one."""
        answered = False
        for message in messages(data):
            if isinstance(message, JSONRPCError) and message.id is None:
                message.id = asked
            if isinstance(message, JSONRPCResponse | JSONRPCError):
                answered = answered or message.id == asked
            await self.put(message)
        return answered

    async def put_event(self, event: Event, asked: str | int | None = None) -> bool:
        if event.kind != "message":
            return False
        if not isinstance(event.data, TooLong):
            return await self.put_frame(event.data, asked)
        whose = asked if asked is not None else addressee(event.data.head, event.data.tail)
        await self.put(failure(whose, self.too_large))
        return whose == asked

    @property
    def too_large(self) -> str:
        return f"the answer is too large: more than {self.most_bytes} bytes"

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def inbox(most_bytes: int) -> AsyncIterator[tuple[Slot, Inbox]]:
    send, receive = anyio.create_memory_object_stream[Named](64)
    async with send, receive:
        yield Slot(send, most_bytes), Inbox(receive)
