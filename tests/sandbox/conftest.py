"""Fixtures of the sandbox's tests: sandboxes with small limits, and things outside that attacks aim at."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.process.reaper import Reaper
from gateway.sandbox.provider import BubblewrapProvider
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_toolset import SandboxToolset
from gateway.toolset import Session
from gateway.types import Task, ToolCall, ToolResult

SMALL = SandboxSettings(memory_mb=192, processes=40, disk_mb=16, files=500, output_bytes=65536)


@asynccontextmanager
async def open_session(settings: SandboxSettings = SMALL) -> AsyncIterator[Session]:
    """A rollout's session with all three tools."""
    reaper = Reaper()
    try:
        toolset = SandboxToolset(("python", "shell", "files"), settings, BubblewrapProvider(reaper))
        async with toolset.open(Task()) as session:
            yield session
    finally:
        with anyio.CancelScope(shield=True):
            await reaper.stop()


async def call(session: Session, tool: str, within_s: float = 50.0, **arguments: object) -> ToolResult:
    with anyio.fail_after(within_s):
        return await session.call(ToolCall("1", tool, json.dumps(arguments)))


@pytest.fixture
async def provider() -> AsyncIterator[BubblewrapProvider]:
    reaper = Reaper()
    yield BubblewrapProvider(reaper)
    with anyio.CancelScope(shield=True):
        await reaper.stop()


def find_bubblewraps(parent: int) -> list[int]:
    """The outer processes of sandboxes of a gateway."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n"]


def kill_sandbox(target: str) -> None:
    """Ends the only sandbox, as a person or a machine without memory would."""
    (outer,) = find_bubblewraps(os.getpid())
    (first,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    os.kill(outer if target == "bubblewrap" else int(first), 9)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What exists outside of the sandbox, by the names that attacks use."""
    folder, name = tmp_path_factory.mktemp("outside"), secrets.token_hex(8)
    (folder / "secret").write_text("secret")
    shared, key = Path(f"/dev/shm/mtrl-{name}"), secrets.randbits(30)
    shared.write_text("secret")
    libc = ctypes.CDLL(None)
    segment = libc.shmget(key, 4096, 0o1600)
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
        open(folder / "secret") as inherited,
    ):
        os.set_inheritable(inherited.fileno(), True)
        abstract.bind(f"\0{name}")
        file.bind(str(folder / "socket"))
        abstract.listen()
        file.listen()
        yield {
            "port": port.getsockname()[1], "abstract": name, "socket": str(folder / "socket"), "key": key,
            "secret": str(folder / "secret"), "pid": os.getpid(), "marker": f"m{name}",
            "group": os.getpgrp(), "shared": str(shared), "victim_file": f"/rollout/{name}",
            "descriptor": inherited.fileno(),
        }  # fmt: skip
    shared.unlink()
    libc.shmctl(segment, 0, None)
    assert (folder / "secret").read_text() == "secret"
