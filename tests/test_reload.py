"""Tests of `Gateway.reload`: all or nothing, without affecting open sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import anyio
import pytest

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.toolset import Session
from gateway.types import Outcome, Task, ToolCall


class LoggedToolset(NativeToolset):
    """A toolset that logs when it is entered and left."""

    def __init__(self, name: str, life: list[str], *, broken: bool = False) -> None:
        def say() -> str:
            """Says its name."""
            return name

        super().__init__([FunctionTool(say, name=name, owner=name)])
        self.name, self.life, self.broken = name, life, broken

    async def __aenter__(self) -> Self:
        if self.broken:
            raise ConfigError("cannot start", file=self.name)
        self.life.append(f"+{self.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.life.append(f"-{self.name}")


def source(name: str, life: list[str], key: str | None = None, *, broken: bool = False) -> Source:
    return Source(key or name, LoggedToolset(name, life, broken=broken))


def names(gateway: Gateway) -> list[str]:
    return [spec.name for spec in gateway.specs]


async def wait_until_settled() -> None:
    with anyio.fail_after(60):
        await anyio.wait_all_tasks_blocked()


async def test_reload_keeps_equal_sources_starts_new_and_ends_removed_ones() -> None:
    life: list[str] = []
    async with Gateway([source("a", life), source("b", life)]) as gateway:
        changes: list[bool] = []
        gateway.on_change.append(lambda: changes.append(True))
        await gateway.reload([source("b", life), source("c", life)])
        await wait_until_settled()
        assert names(gateway) == ["b", "c"]
        assert sorted(life[:2]) == ["+a", "+b"] and life[2:] == ["+c", "-a"] and changes == [True]
    assert sorted(life[4:]) == ["-b", "-c"]


async def test_removed_source_stays_until_its_sessions_close() -> None:
    life: list[str] = []
    async with Gateway([source("a", life)]) as gateway:
        session = await gateway.begin(Task())
        await gateway.reload([source("b", life)])
        await wait_until_settled()
        assert "-a" not in life
        assert (await session.call(ToolCall("1", "a"))).text == "a"
        assert (await session.call(ToolCall("2", "b"))).outcome is Outcome.INVALID
        await session.close()
        await wait_until_settled()
        assert life == ["+a", "+b", "-a"]


async def test_reload_during_opening_keeps_the_sessions_sources() -> None:
    life: list[str] = []
    opening, go_on = anyio.Event(), anyio.Event()

    class Slow(LoggedToolset):
        @asynccontextmanager
        async def open(self, task: Task) -> AsyncIterator[Session]:
            opening.set()
            await go_on.wait()
            async with super().open(task) as session:
                yield session

    async with Gateway([Source("a", Slow("a", life)), source("b", life)]) as gateway:

        async def roll() -> None:
            async with gateway.open() as session:
                assert "-b" not in life
                assert (await session.call(ToolCall("1", "b"))).text == "b"

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(roll)
                await opening.wait()
                await gateway.reload([source("c", life)])
                await wait_until_settled()
                go_on.set()
            await wait_until_settled()
        assert sorted(life[3:]) == ["-a", "-b"]


async def test_name_collision_on_reload_leaves_the_gateway_unchanged() -> None:
    life: list[str] = []
    async with Gateway([source("a", life)]) as gateway:
        with pytest.raises(ConfigError, match="two tools are named 'b'"):
            await gateway.reload([source("b", life, "one"), source("b", life, "other")])
        await wait_until_settled()
        assert names(gateway) == ["a"] and life == ["+a", "+b", "+b", "-b", "-b"]


async def test_later_tool_cannot_take_over_a_name() -> None:
    life: list[str] = []
    late = source("z", life)
    async with Gateway([late, source("a", life)]) as gateway:
        assert names(gateway) == ["z", "a"]
        late.toolset.specs = (*late.toolset.specs, *LoggedToolset("a", life).specs)  # type: ignore[misc]
        assert names(gateway) == ["z", "a"]
        async with gateway.open() as session:
            assert (await session.call(ToolCall("1", "a"))).text == "a"
        assert list(gateway.table.set_aside) == ["a of a"]
