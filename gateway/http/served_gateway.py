"""Protocols of a gateway that the HTTP server can serve: a plain one, one that records, or one that replays a tape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Protocol, runtime_checkable

from gateway.gateway import ReloadRefusal
from gateway.limits import CallScope
from gateway.loop_watchdog import LoopWatchdog
from gateway.mcp_client.server_status import ServerLog, ServerStatus
from gateway.server_start import ServerStart
from gateway.session import AnySession, Observer, RunningCall
from gateway.tool_table import Source, ToolTable
from gateway.types import DEFAULT_CONTEXT, Context, Task, ToolCall, ToolResult, ToolSpec


class ServedSession(AnySession, Protocol):
    """A session of a gateway in this process."""

    @property
    def finish_s(self) -> float: ...

    async def calls(
        self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT, scope: CallScope | None = None
    ) -> list[ToolResult]:
        """With `scope` the caller can cancel the calls."""
        ...

    @property
    def task(self) -> Task: ...

    @property
    def closed(self) -> bool: ...

    @property
    def remaining_s(self) -> float | None: ...

    @property
    def running(self) -> Sequence[RunningCall]: ...

    @property
    def has_rewards(self) -> bool:
        """Whether closing it could collect the rewards."""
        ...

    @property
    def feedback_name(self) -> str | None:
        """The name of its interaction."""
        ...

    @property
    def stack(self) -> AsyncExitStack:
        """Callbacks that run when the session closes, for whatever reason."""
        ...


class ServedGateway(Protocol):
    """A gateway in this process."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    @property
    def table(self) -> ToolTable: ...

    @property
    def sources(self) -> Sequence[Source]: ...

    @property
    def sessions(self) -> Mapping[str, ServedSession]:
        """All open sessions, however they were opened."""
        ...

    @property
    def observers(self) -> list[Observer]: ...

    @property
    def start(self) -> ServerStart:
        """The servers that are still starting."""
        ...

    @property
    def reload_refusal(self) -> ReloadRefusal | None:
        """Why the files as they are now are not in use, if that is so."""
        ...

    @property
    def loop_watchdog(self) -> LoopWatchdog:
        """Measures how long the event loop was held."""
        ...

    async def begin(self, task: Task) -> ServedSession: ...

    def open(self, task: Task) -> AbstractAsyncContextManager[AnySession]: ...


@runtime_checkable
class RestartableServer(Protocol):
    """The MCP server behind a source."""

    name: str
    log: ServerLog
    """What its processes wrote to standard error."""

    @property
    def status(self) -> ServerStatus: ...

    def restart(self) -> None:
        """Ends its connections and connects again at once; does not wait for that."""
        ...


def restartable_servers(gateway: ServedGateway) -> list[RestartableServer]:
    """The servers behind the gateway's sources."""
    return [source.backend for source in gateway.sources if isinstance(source.backend, RestartableServer)]
