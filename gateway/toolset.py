"""A toolset is a list of specs and a way to open a session on them; toolsets combined are a toolset.

Everything that can be called is one of these: native functions, an MCP server, feedback interactions, a tape,
another gateway. The wrappers here change names and membership only; `limit.py` adds patience and its ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from gateway.errors import ConfigError
from gateway.types import ALONE, Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec


class Session(Protocol):
    """One rollout's hold on a toolset. It holds no cancel scope, so any task may close it."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        """Never raises for what a tool did: every ending is an outcome. Cancelling it cancels the tool."""
        ...

    async def finish(self) -> Mapping[str, float]:
        """End-of-rollout rewards by tool; asked once, after the last call and before the session closes."""
        ...


class Toolset(Protocol):
    """Entered and left by one task, which may own connections; sessions are opened from any task."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """What is offered now, the same object until that changes; an upstream may do so while sessions are open."""
        ...

    def open(self, task: Task) -> AbstractAsyncContextManager[Session]: ...


class Wrapped:
    """A toolset that stands before another one and lets everything through; wrappers override what they change."""

    def __init__(self, inner: Toolset) -> None:
        self.inner = inner

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self.inner.__aexit__(kind, error, trace)

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self.inner.specs

    def open(self, task: Task) -> AbstractAsyncContextManager[Session]:
        return self.inner.open(task)


Rename = Callable[[ToolSpec], str | None]
"""The name under which a tool is offered, or None to leave it out."""


class Renamed(Wrapped):
    """Offers a toolset under other names; a tool without a name is left out."""

    def __init__(self, inner: Toolset, rename: Rename) -> None:
        super().__init__(inner)
        self.rename = rename
        self._seen: Sequence[ToolSpec] | None = None
        self._specs: tuple[ToolSpec, ...] = ()
        self._inner_names: dict[str, str] = {}

    @property
    def specs(self) -> Sequence[ToolSpec]:
        self._look()
        return self._specs

    @property
    def inner_names(self) -> Mapping[str, str]:
        """Offered name -> the name behind it."""
        self._look()
        return self._inner_names

    def _look(self) -> None:
        """Names everything anew, but only when the listing behind has changed."""
        inner = self.inner.specs
        if inner is not self._seen:
            named = [(self.rename(spec), spec) for spec in inner]
            self._inner_names = {name: spec.name for name, spec in named if name is not None}
            self._specs = tuple(replace(spec, name=name) for name, spec in named if name is not None)
            self._seen = inner

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        names = self.inner_names
        wanted = None if task.tools is None else tuple(names[name] for name in task.tools if name in names)
        create = {names[name]: kwargs for name, kwargs in task.create.items() if name in names}
        async with self.inner.open(replace(task, tools=wanted, create=create)) as session:
            yield _RenamedSession(session, self)


class _RenamedSession:
    __slots__ = ("_owner", "_session")

    def __init__(self, session: Session, owner: Renamed) -> None:
        self._session, self._owner = session, owner

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._owner.specs

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        name = self._owner.inner_names.get(call.name)
        if name is None:
            return missing(call.name, self.specs)
        return await self._session.call(replace(call, name=name), context)

    async def finish(self) -> Mapping[str, float]:
        offered = {inner: name for name, inner in self._owner.inner_names.items()}
        return {offered.get(name, name): reward for name, reward in (await self._session.finish()).items()}


def prefix(inner: Toolset, text: str) -> Toolset:
    """Every name begins with `text`."""
    return Renamed(inner, lambda spec: text + spec.name)


def allow(inner: Toolset, names: Iterable[str]) -> Toolset:
    """Only these names are offered."""
    chosen = frozenset(names)
    return Renamed(inner, lambda spec: spec.name if spec.name in chosen else None)


NO_SUCH_TOOL = "no such tool"


def missing(name: str, specs: Sequence[ToolSpec]) -> ToolResult:
    """What the policy reads when it calls a tool that is not there."""
    offered = ", ".join(sorted(spec.name for spec in specs if spec.audience == "policy")) or "none"
    text = f"There is no tool named {name!r}. Available tools: {offered}."
    return ToolResult((Text(text),), Outcome.INVALID, reason=NO_SUCH_TOOL)


class Combined:
    """Several toolsets as one. Two owners of one name is a mistake that only the operator can mend."""

    def __init__(self, toolsets: Sequence[Toolset]) -> None:
        self.toolsets = tuple(toolsets)
        self._stack: AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for toolset in self.toolsets:
                await stack.enter_async_context(toolset)
            owners(self.toolsets)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        stack, self._stack = self._stack, None
        return await stack.__aexit__(kind, error, trace) if stack else None

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return [spec for toolset in self.toolsets for spec in toolset.specs]

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        async with AsyncExitStack() as stack:
            yield _CombinedSession([await stack.enter_async_context(one.open(task)) for one in self.toolsets])


class _CombinedSession:
    __slots__ = ("_sessions",)

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return [spec for session in self._sessions for spec in session.specs]

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        for session in self._sessions:
            if any(spec.name == call.name for spec in session.specs):
                return await session.call(call, context)
        return missing(call.name, self.specs)

    async def finish(self) -> Mapping[str, float]:
        rewards: dict[str, float] = {}
        for session in self._sessions:
            rewards.update(await session.finish())
        return rewards


def owners(toolsets: Iterable[Toolset]) -> dict[str, Toolset]:
    """Who answers for each name; raises where two would."""
    found: dict[str, tuple[Toolset, ToolSpec]] = {}
    for toolset in toolsets:
        for spec in toolset.specs:
            if spec.name in found:
                raise collision(found[spec.name][1], spec)
            found[spec.name] = (toolset, spec)
    return {name: toolset for name, (toolset, _) in found.items()}


def collision(one: ToolSpec, other: ToolSpec) -> ConfigError:
    return ConfigError(
        f"two tools are named {one.name!r}: one of {one.owner or 'no owner'}, one of {other.owner or 'no owner'}",
        field=one.name,
        remedy="give one of them a `prefix`, or leave it out with `allow`",
    )
