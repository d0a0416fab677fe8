"""Tests of watching configuration files for changes and SIGHUP."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
import anyio.to_thread
import pytest

from gateway.serving import watch_files
from tests.conftest import Write

INTERVAL_S = 0.02


async def _next_change(events: AsyncGenerator[None]) -> None:
    with anyio.fail_after(60):
        await anext(events)


@pytest.mark.parametrize("change", ["add", "remove", "replace"])
async def test_changed_file_in_a_folder_is_noticed(change: str, write: Write) -> None:
    file = write("tool_configs/a.yaml", "tools: []")
    async with aclosing(watch_files([file.parent], every_s=INTERVAL_S)) as events:
        match change:
            case "add":
                write("tool_configs/b.yml", "")
            case "remove":
                file.unlink()
            case "replace":
                write("new", "tools: {}").replace(file)
        await _next_change(events)


async def test_file_added_later_is_watched(write: Write) -> None:
    paths = [write("a.yaml", "")]
    async with aclosing(watch_files(paths, every_s=INTERVAL_S)) as events:
        paths.append(write("b.yaml", ""))
        await _next_change(events)
        paths[1].write_text("changed")
        await _next_change(events)


async def test_sighup_is_an_event_without_a_change(write: Write) -> None:
    file = write("a.yaml", "")
    before = signal.getsignal(signal.SIGHUP)
    async with aclosing(watch_files([file], every_s=3600)) as events, anyio.create_task_group() as group:
        group.start_soon(_next_change, events)
        with anyio.fail_after(60):
            while signal.getsignal(signal.SIGHUP) == before:
                await anyio.lowlevel.checkpoint()
        os.kill(os.getpid(), signal.SIGHUP)
