"""Large files and answers of sandboxes hold no event loop, neither the gateway's nor that of a server of sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import from_thread
from pydantic import SecretStr

from gateway.http.settings import Settings
from gateway.http.uvicorn_server import StopSignal, collect_garbage_seldom
from gateway.loop_watchdog import LoopWatchdog
from gateway.process.reaper import Reaper
from gateway.sandbox.choose_provider import choose_provider
from gateway.sandbox.large_messages import PIECE_BYTES
from gateway.sandbox.provider import Sandbox, opened
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_state import MAX_BYTES, SandboxStates
from gateway.state.prepared_state import PreparedStates
from gateway.state.state_hash import hash_state
from mtrl_plugins.sandboxes.sandbox_server import serving
from mtrl_plugins.sandboxes.settings import RemoteSettings
from tests.hostile.injector import PATIENCE_S, assert_not_held

LARGE, TOKEN = 16 * 2**20, "a-token-of-the-tests"
LARGE_SETTINGS = SandboxSettings(output_bytes=LARGE)


@pytest.fixture(params=["here", "remote"])
def settings(request: pytest.FixtureRequest) -> Iterator[SandboxSettings]:
    """The settings of a sandbox here, and of one of a server, which has a loop of its own, in a thread."""
    if request.param == "here":
        yield LARGE_SETTINGS
        return
    http = Settings(port=0, token=SecretStr(TOKEN))
    with from_thread.start_blocking_portal("asyncio") as portal:
        context = portal.wrap_async_context_manager(serving(http, 2, 60.0, portal.call(StopSignal)))
        with context as (url, _):
            remote = RemoteSettings.model_validate({"url": url, "token": TOKEN})
            yield LARGE_SETTINGS.model_copy(update={"remote": remote})


@asynccontextmanager
async def watched_sandbox(settings: SandboxSettings) -> AsyncIterator[tuple[Sandbox, Reaper]]:
    """A sandbox; fails if the event loop was held during the block."""
    reaper, watchdog = Reaper(), LoopWatchdog(interval_s=0.005)
    try:
        async with opened(choose_provider(settings, reaper), settings) as sandbox:
            collect_garbage_seldom()
            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watchdog.run)
                    yield sandbox, reaper
                    tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await reaper.stop()
    assert_not_held(watchdog)


async def test_large_answers_of_sandboxes_are_read_beside_others(settings: SandboxSettings) -> None:
    async with watched_sandbox(settings) as (sandbox, _):
        done = await sandbox.run_python(f"print('x\\n' * {LARGE // 2 - 100})", PATIENCE_S)
    assert not done.stopped and len(done.stdout) > LARGE - 300


async def test_large_states_go_into_sandboxes_and_are_hashed_beside_others(
    settings: SandboxSettings, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (LARGE >> 8) + b"the end"
    (tmp_path / "large").write_bytes(content)
    async with watched_sandbox(settings) as (sandbox, reaper):
        states = SandboxStates(PreparedStates(tmp_path, None), reaper)
        await states.put(sandbox, tmp_path)
        assert await sandbox.get("/rollout/large", MAX_BYTES) == content
        assert await states.hash(sandbox, "") == hash_state(tmp_path)
        with pytest.raises(OSError, match="more than"):
            await sandbox.get("/rollout/large", len(content) - 1)
        await sandbox.put("/rollout/a/b", b"x" * PIECE_BYTES + b"y")
        await sandbox.put("/rollout/a/b", b"z", append=True)
        assert await sandbox.get("/rollout/a/b", PIECE_BYTES + 2) == b"x" * PIECE_BYTES + b"yz"
        await sandbox.put("/rollout/a/b", b"")
        assert await sandbox.get("/rollout/a/b", 1) == b""
