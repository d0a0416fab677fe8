"""What must be seen of a gateway to serve it: one of sources, one that records, or one that answers from a tape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Protocol

from gateway.session import AnySession, Observer, Running
from gateway.table import Source, Table
from gateway.types import Task, ToolSpec


class HostedSession(AnySession, Protocol):
    @property
    def task(self) -> Task: ...

    @property
    def closed(self) -> bool: ...

    @property
    def remaining_s(self) -> float | None: ...

    @property
    def running(self) -> Sequence[Running]: ...

    @property
    def called(self) -> int: ...

    @property
    def age_s(self) -> float: ...

    @property
    def heard(self) -> object | None:
        """The session of its interactions, where it has any."""
        ...

    @property
    def stack(self) -> AsyncExitStack:
        """What is called back when it closes, for whatever reason."""
        ...


class Hosted(Protocol):
    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    @property
    def table(self) -> Table: ...

    @property
    def sources(self) -> Sequence[Source]: ...

    @property
    def sessions(self) -> Mapping[str, HostedSession]:
        """All that are open, by whichever door."""
        ...

    @property
    def observers(self) -> list[Observer]: ...

    async def begin(self, task: Task) -> HostedSession: ...

    def open(self, task: Task) -> AbstractAsyncContextManager[AnySession]: ...
