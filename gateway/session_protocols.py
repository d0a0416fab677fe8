"""What a gateway and its sessions can do, whether in this process, remote or on a tape."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar

from gateway.toolset import Session
from gateway.types import DEFAULT_CONTEXT, Context, Feedback, Task, ToolCall, ToolResult, ToolSpec


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward of the rollout, with its source."""

    source: str
    value: float
    kind: Literal["call", "feedback", "end", "count"]
    """`count`: it counts something beside the rewards, such as files of a reward that a policy had planted."""
    call_id: str | None = None


class SessionMethods(Protocol):
    """What a gateway's session adds to a toolset's; a wrapper of one inherits it, so that mypy compares the methods."""

    async def calls(self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT) -> list[ToolResult]: ...

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback: ...

    async def close(self, *, is_abandoned: bool = False) -> None:
        """Safe to call again. An abandoned session, whose rewards nobody wants, is not graded."""
        ...


S = TypeVar("S", bound=SessionMethods)


@asynccontextmanager
async def open_session(begin: Callable[[], Awaitable[S]]) -> AsyncIterator[S]:
    """A session for a `with` block, which is abandoned if the block raises."""
    session, is_whole = await begin(), False
    try:
        yield session
        is_whole = True
    finally:
        await session.close(is_abandoned=not is_whole)


class AnySession(Session, SessionMethods, Protocol):
    """A gateway session, in this process or remote."""

    @property
    def id(self) -> str: ...

    @property
    def rewards(self) -> Sequence[Reward]: ...

    @property
    def states(self) -> Mapping[str, str]:
        """The hashes of the states of its servers and sandboxes, once it is finished, for a task that wants them."""
        ...


class AnyGateway(Protocol):
    """A gateway, in this process or remote; enter it before opening sessions."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    async def begin(self, task: Task) -> AnySession: ...

    def open(self, task: Task = ...) -> AbstractAsyncContextManager[AnySession]: ...
