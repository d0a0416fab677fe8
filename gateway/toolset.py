"""The `Toolset` and `Session` protocols, and toolsets that wrap and rename others.

Everything callable is a toolset: native functions, an MCP server, feedback interactions, a tape, another gateway.
`limits.py` has the toolset that applies limits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from gateway.errors import ConfigError
from gateway.types import (
    DEFAULT_CONTEXT,
    Context,
    Outcome,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
)

PLANTED = "/planted"
"""The end of the name under which a grader counts files of a reward that a policy had planted."""


class Session(Protocol):
    """One rollout's session on a toolset. It contains no cancel scope, so any task may close it."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        """Runs a call; cancelling it cancels the tool. Never raises for what a tool did: every end is an outcome."""
        ...

    async def finish(self) -> Mapping[str, float]:
        """Returns end-of-rollout rewards by tool; called once, after the last call and before the session closes.

        Names that end in `PLANTED` are counts, no rewards.
        """
        ...


async def hash_session_state(session: Session) -> str | None:
    """The hash of the state that a session leaves, if its toolset has one; raises Unavailable if it cannot be read."""
    method: Callable[[], Awaitable[str | None]] | None = getattr(session, "hash_state", None)
    return None if method is None else await method()


class Toolset(Protocol):
    """A list of tools and a way to open sessions. One task enters and leaves it; any task may open sessions."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools offered now; the same object until they change, which may happen while sessions are open."""
        ...

    def open(self, task: Task) -> AbstractAsyncContextManager[Session]: ...


class ToolsetWrapper:
    """A toolset that delegates to another one; subclasses override what they change."""

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


class SessionWrapper:
    """A session on another toolset's session, which it opens and closes: enter it before use.

    It is no generator, of which ten thousand sessions would hold seventy thousand objects: garbage collection goes
    through all of them while every call waits.
    """

    __slots__ = ("_opening", "_owner", "_session")

    def __init__(self, opening: AbstractAsyncContextManager[Session], owner: Toolset) -> None:
        self._opening, self._owner = opening, owner

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._owner.specs

    async def __aenter__(self) -> Self:
        self._session = await self._opening.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._opening.__aexit__(kind, error, trace)

    async def finish(self) -> Mapping[str, float]:
        return await self._session.finish()

    async def hash_state(self) -> str | None:
        return await hash_session_state(self._session)


RenameFn = Callable[[ToolSpec], str | None]
"""Returns the name under which a tool is offered, or None to leave it out."""


class RenamedToolset(ToolsetWrapper):
    """Offers a toolset under other names; a tool without a name is left out."""

    def __init__(self, inner: Toolset, rename: RenameFn) -> None:
        super().__init__(inner)
        self.rename = rename
        self._listed: Sequence[ToolSpec] | None = None
        self._specs: tuple[ToolSpec, ...] = ()
        self._inner_names: dict[str, str] = {}

    @property
    def specs(self) -> Sequence[ToolSpec]:
        self._refresh_names()
        return self._specs

    @property
    def inner_names(self) -> Mapping[str, str]:
        """The inner toolset's name of each offered name."""
        self._refresh_names()
        return self._inner_names

    def _refresh_names(self) -> None:
        """Computes the names again if the inner list has changed."""
        inner = self.inner.specs
        if inner is not self._listed:
            named = [(self.rename(spec), spec) for spec in inner]
            self._inner_names = {name: spec.name for name, spec in named if name is not None}
            self._specs = tuple(replace(spec, name=name) for name, spec in named if name is not None)
            self._listed = inner

    def open(self, task: Task) -> AbstractAsyncContextManager[Session]:
        names = self.inner_names
        tools = None if task.tools is None else tuple(names[name] for name in task.tools if name in names)
        create = {names[name]: kwargs for name, kwargs in task.create.items() if name in names}
        return _RenamedSession(self.inner.open(replace(task, tools=tools, create=create)), self)


class _RenamedSession(SessionWrapper):
    __slots__ = ()
    _owner: RenamedToolset

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        name = self._owner.inner_names.get(call.name)
        if name is None:
            return unknown_tool_result(call.name, self.specs)
        return await self._session.call(call.renamed(name), context)

    async def finish(self) -> Mapping[str, float]:
        offered = {inner: name for name, inner in self._owner.inner_names.items()}
        return {offered.get(name, name): reward for name, reward in (await self._session.finish()).items()}


def add_prefix(inner: Toolset, text: str) -> Toolset:
    """Adds a prefix to every name."""
    return RenamedToolset(inner, lambda spec: text + spec.name)


NO_SUCH_TOOL = "no such tool"


def unknown_tool_result(name: str, specs: Sequence[ToolSpec]) -> ToolResult:
    """The result that a policy gets for a tool that does not exist."""
    offered = ", ".join(sorted(spec.name for spec in specs if spec.audience == "policy")) or "none"
    text = f"There is no tool named {name!r}. Available tools: {offered}."
    return ToolResult((Text(text),), Outcome.INVALID, reason=NO_SUCH_TOOL)


def name_collision(first: ToolSpec, other: ToolSpec) -> ConfigError:
    """The error for two tools with one name."""
    return ConfigError(
        f"two tools are named {first.name!r}: one of {first.owner or 'no owner'}, one of {other.owner or 'no owner'}",
        field=first.name,
        remedy="give one of them a `prefix`, or leave it out with `allow`",
    )
