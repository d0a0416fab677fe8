"""The requests that a stdio server has not answered yet, to find the one for which an answer without a readable id is.

Lines that are no answers, such as a server's log, are left alone. An answer that nobody can assign ends no other call:
it is held against those that were open then, until only one of them is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from gateway.mcp_client.messages import GUESS_BYTES

_ANSWER = re.compile(rb'\s*(?:\[\s*)?\{\s*"(?:jsonrpc|id|result|error)"\s*:')
_METHOD = re.compile(rb'"method"\s*:')
MAX_UNASSIGNED = 64
RequestId = str | int


class OpenRequests:
    """Requests that were sent and not answered, and broken answers that may be for several of them."""

    def __init__(self) -> None:
        self._open: set[RequestId] = set()
        self._broken: list[tuple[set[RequestId], str]] = []

    def note_sent(self, message: JSONRPCMessage) -> None:
        """Notes a message to the server: a request is open, one that is cancelled is not any more."""
        if isinstance(message, JSONRPCRequest):
            self._open.add(message.id)
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            request_id = (message.params or {}).get("requestId")
            if isinstance(request_id, str | int):
                self._open.discard(request_id)

    def note_answered(self, message: JSONRPCMessage) -> None:
        """Notes a message of the server: a request that it answers is not open any more."""
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._open.discard(message.id)

    def note_broken(self, line: bytes, problem: str) -> None:
        """Notes a line that cannot be read, if it was meant as an answer."""
        is_answer = _ANSWER.match(line) and not _METHOD.search(line, 0, GUESS_BYTES)
        if is_answer and self._open and len(self._broken) < MAX_UNASSIGNED:
            self._broken.append((set(self._open), problem))

    def take_lost(self) -> Iterator[tuple[RequestId, str]]:
        """The requests whose answers were broken, with the problem: those left when as many answers were broken."""
        self._broken = [(rest, problem) for ids, problem in self._broken if (rest := ids & self._open)]
        candidates = {request_id for ids, _ in self._broken for request_id in ids}
        if not candidates or len(self._broken) < len(candidates):
            return
        problems = [problem for _, problem in self._broken]
        self._broken.clear()
        self._open -= candidates
        yield from zip(sorted(candidates, key=str), problems, strict=False)
