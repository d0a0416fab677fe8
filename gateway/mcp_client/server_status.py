"""The state of an MCP server, for operators: what it is, lines on the console when it changes, and the server's log."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import anyio

from gateway.mcp_client.errors import CloseReason
from gateway.process.log_tail import LogTail
from gateway.types import EMPTY

State = Literal["starting", "up", "unresponsive", "restarting", "down", "stale"]


@dataclass(frozen=True)
class ServerStatus:
    """The state of one server, for operators.

    `unresponsive`: a ping is awaited, because a call timed out or nothing came for long. `restarting`: the connection
    was lost and is made again. `stale`: it is down, and its last listed tools are still offered.
    """

    name: str
    state: State
    reason: str = ""
    remedy: str = ""
    tools: int = 0
    quarantined: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    """Tool -> why it is not offered."""
    transport: str = ""
    protocol_version: str = ""
    children: tuple[int, ...] = ()
    """Process ids."""
    reconnects: int = 0
    last_loss: str = ""
    """Why the connection was lost last, also after the server has recovered."""
    since: float = 0.0
    """The `anyio.current_time` at which this state began."""
    cuts: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    """Reason -> connections that were cut because the server sent without end."""


log = logging.getLogger(__name__)
RESTARTED_BY_HAND = CloseReason("an operator restarted it")


class StateTracker:
    """Follows the state of one server. Entered states and reasons are kept until the next ones."""

    def __init__(self, name: str, *, is_process: bool) -> None:
        self.name, self.is_process = name, is_process
        self.state: State = "starting"
        self.close_reason: CloseReason | None = None
        self.since = 0.0
        self.connect_count = 0
        """How often it was connected to."""
        self.last_loss, self._lost_at = "", 0.0
        self.down_reason: str | None = None
        """Set when the last attempt to connect failed, so that calls fail at once instead of waiting."""

    def enter(self, state: State, close_reason: CloseReason | None = None) -> None:
        """Begins a state."""
        self.state, self.close_reason, self.since = state, close_reason, anyio.current_time()

    def record_attempt(self, close_reason: CloseReason) -> None:
        """One transport failed, and another is tried."""
        self.enter("restarting" if self.connect_count else "starting", close_reason)

    def record_restart(self) -> None:
        """An operator restarts it. Calls wait for the new connection."""
        self.down_reason = None
        self.enter("restarting", RESTARTED_BY_HAND)

    def record_loss(self, close_reason: CloseReason) -> None:
        """The connection was lost."""
        self.last_loss, self._lost_at = str(close_reason), anyio.current_time()
        self.enter("restarting", close_reason)
        action = "restarting it" if self.is_process else "connecting to it again"
        log.warning("server %r is down: %s; %s", self.name, close_reason, action)

    def record_success(self) -> None:
        """It is connected, and its tools are listed."""
        if self.connect_count > 1:
            down_s = anyio.current_time() - self._lost_at
            verb = "was restarted" if self.is_process else "is connected to again"
            log.warning("server %r %s and works again after %.1f s", self.name, verb, down_s)
        elif self.down_reason is not None:
            log.warning("server %r is up", self.name)
        self.enter("up")
        self.down_reason = None

    def record_failure(self, close_reason: CloseReason, *, has_tools: bool, is_reported: bool = False) -> None:
        """No attempt succeeded. Logged once for each reason in a row: they are repeated for as long as it is down.

        `is_reported`: somebody else tells that it cannot be started.
        """
        if self.down_reason is None or str(close_reason) != str(self.close_reason):
            verb = "restarted" if self.last_loss else "started"
            level = logging.INFO if is_reported and not self.connect_count else logging.WARNING
            log.log(level, "server %r cannot be %s: %s", self.name, verb, close_reason)
        self.down_reason = f"mcp server {self.name!r} is down: {close_reason}"
        self.enter("stale" if has_tools else "down", close_reason)


MAX_LOG_BYTES = 16_384
"""How much is kept of each server."""
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[@-Z\\-_])")


class ServerLog(LogTail):
    """The last output of one server's processes to standard error, the present one's at the end.

    It is text of others: escape sequences are removed, and what could change how a terminal or a page reads is escaped.
    """

    def __init__(self) -> None:
        super().__init__(MAX_LOG_BYTES)

    def note(self, text: str) -> None:
        """Appends a line of our own."""
        begins_line = not self._data or self._data.endswith(b"\n")
        self.add(f"{'' if begins_line else chr(10)}[{text}]\n".encode())

    @property
    def text(self) -> str:
        """The tail in whole lines."""
        tail = bytes(self._data)
        if len(tail) == MAX_LOG_BYTES and b"\n" in tail:
            tail = tail.partition(b"\n")[2]
        text = _ESCAPE_SEQUENCE.sub("", tail.decode("utf-8", "replace").replace("\r\n", "\n"))
        return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in text).rstrip()


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
