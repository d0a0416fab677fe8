"""A new configuration is taken over whole or not at all, and open rollouts keep what they hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import anyio
import pytest

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.toolset import Session, prefix
from gateway.types import Outcome, Task, ToolCall


class Noted(NativeToolset):
    """A toolset that notes when it is entered and left."""

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.life.append(f"-{self.name}")


def source(name: str, life: list[str], key: str | None = None, *, broken: bool = False) -> Source:
    return Source(key or name, Noted(name, life, broken=broken))


def names(gateway: Gateway) -> list[str]:
    return [spec.name for spec in gateway.specs]


async def settled() -> None:
    with anyio.fail_after(5):
        await anyio.wait_all_tasks_blocked()


async def test_what_is_equal_stays_what_is_new_starts_and_what_is_gone_ends() -> None:
    life: list[str] = []
    async with Gateway([source("a", life), source("b", life)]) as gateway:
        told: list[bool] = []
        gateway.on_change.append(lambda: told.append(True))
        await gateway.reload([source("b", life), source("c", life)])
        await settled()
        assert names(gateway) == ["b", "c"]
        assert sorted(life[:2]) == ["+a", "+b"] and life[2:] == ["+c", "-a"] and told == [True]
    assert sorted(life[4:]) == ["-b", "-c"]


async def test_an_open_session_keeps_a_source_that_is_gone_until_it_closes() -> None:
    life: list[str] = []
    async with Gateway([source("a", life)]) as gateway:
        session = await gateway.begin(Task())
        await gateway.reload([source("b", life)])
        await settled()
        assert "-a" not in life
        assert (await session.call(ToolCall("1", "a"))).text == "a"
        assert (await session.call(ToolCall("2", "b"))).outcome is Outcome.INVALID
        await session.close()
        await settled()
        assert life == ["+a", "+b", "-a"]


async def test_a_session_that_is_being_opened_keeps_all_that_it_is_about_to_use() -> None:
    life: list[str] = []
    opening, go_on = anyio.Event(), anyio.Event()

    class Slow(Noted):
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

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(roll)
                await opening.wait()
                await gateway.reload([source("c", life)])
                await settled()
                go_on.set()
            await settled()
        assert sorted(life[3:]) == ["-a", "-b"]


async def test_a_source_that_cannot_start_leaves_everything_as_it_was() -> None:
    life: list[str] = []
    async with Gateway([source("a", life)]) as gateway:
        with pytest.raises(ConfigError, match="cannot start"):
            await gateway.reload([source("b", life), source("c", life, broken=True)])
        await settled()
        assert names(gateway) == ["a"] and life in (["+a", "+b", "-b"], ["+a"])


async def test_a_collision_in_the_new_configuration_leaves_everything_as_it_was() -> None:
    life: list[str] = []
    async with Gateway([source("a", life)]) as gateway:
        with pytest.raises(ConfigError, match="two tools are named 'b'"):
            await gateway.reload([source("b", life, "one"), source("b", life, "other")])
        await settled()
        assert names(gateway) == ["a"] and life == ["+a", "+b", "+b", "-b", "-b"]


async def test_a_tool_that_its_owner_withdraws_is_no_mistake_of_the_policy() -> None:
    owner = Noted("a", [])
    async with Gateway([Source("s", prefix(owner, "my_"))]) as gateway, gateway.open() as session:
        owner.specs = ()
        result = await session.call(ToolCall("1", "my_a"))
        assert (result.outcome, result.reason) == (Outcome.UNAVAILABLE, "its owner no longer offers it")
        assert [spec.name for spec in session.specs] == ["my_a"] and names(gateway) == []
        assert (await session.call(ToolCall("2", "my_b"))).outcome is Outcome.INVALID


async def test_a_tool_that_appears_later_cannot_take_a_name_over() -> None:
    life: list[str] = []
    late = source("z", life)
    async with Gateway([late, source("a", life)]) as gateway:
        assert names(gateway) == ["z", "a"]
        late.toolset.specs = (*late.toolset.specs, *Noted("a", life).specs)  # type: ignore[misc]
        assert names(gateway) == ["z", "a"]
        async with gateway.open() as session:
            assert (await session.call(ToolCall("1", "a"))).text == "a"
        assert list(gateway.table.set_aside) == ["a of a"]
