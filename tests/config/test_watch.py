"""A watcher tells of changes that have settled, and of SIGHUP."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from gateway.config.watch import changes
from tests.conftest import Write

SOON_S = 0.02


async def _next(events: AsyncGenerator[None]) -> None:
    with anyio.fail_after(10):
        await anext(events)


@pytest.mark.parametrize("change", ["write", "add", "remove", "replace"])
async def test_a_change_of_a_folder_is_told(change: str, write: Write) -> None:
    file = write("tool_configs/a.yaml", "tools: []")
    async with aclosing(changes([file.parent], every_s=SOON_S)) as events:
        match change:
            case "write":
                file.write_text("tools: [] # changed")
            case "add":
                write("tool_configs/b.yml", "")
            case "remove":
                file.unlink()
            case "replace":
                write("new", "tools: {}").replace(file)
        await _next(events)


async def test_a_file_that_appears_is_told(write: Write, tmp_path: Path) -> None:
    write("x", "")
    file = tmp_path / "mcp_servers.json"
    async with aclosing(changes([file], every_s=SOON_S)) as events:
        file.write_text("{}")
        await _next(events)


async def test_what_is_neither_yaml_nor_named_is_not_told(write: Write) -> None:
    file = write("tool_configs/a.yaml", "")
    async with aclosing(changes([file.parent], every_s=SOON_S)) as events:
        write("tool_configs/a.yaml~", "an editor's copy")
        with anyio.move_on_after(SOON_S * 10) as scope:
            await anext(events)
        assert scope.cancelled_caught


async def test_one_edit_is_told_once(write: Write) -> None:
    file = write("tool_configs/a.yaml", "")
    async with aclosing(changes([file.parent], every_s=SOON_S)) as events:
        file.write_text("half")
        file.write_text("whole, and longer")
        await _next(events)
        with anyio.move_on_after(SOON_S * 10) as scope:
            await anext(events)
        assert scope.cancelled_caught


async def test_a_file_named_later_is_watched_too(write: Write) -> None:
    paths = [write("a.yaml", "")]
    async with aclosing(changes(paths, every_s=SOON_S)) as events:
        paths.append(write("b.yaml", ""))
        await _next(events)
        paths[1].write_text("changed")
        await _next(events)


async def test_sighup_is_told_at_once_even_without_a_change(write: Write) -> None:
    file = write("a.yaml", "")
    before = signal.getsignal(signal.SIGHUP)
    async with aclosing(changes([file], every_s=3600)) as events, anyio.create_task_group() as group:
        group.start_soon(_next, events)
        with anyio.fail_after(5):
            while signal.getsignal(signal.SIGHUP) == before:
                await anyio.lowlevel.checkpoint()
        os.kill(os.getpid(), signal.SIGHUP)


async def test_a_gateway_in_another_thread_watches_without_signals(write: Write) -> None:
    file = write("a.yaml", "")

    async def watch() -> None:
        async with aclosing(changes([file], every_s=SOON_S)) as events:
            file.write_text("changed")
            await _next(events)

    with anyio.fail_after(20):
        await anyio.to_thread.run_sync(lambda: anyio.run(watch))
