"""Roots and frozen files in containers and on other machines: the same settings, and the same files."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from anyio import lowlevel

from gateway.errors import Unavailable
from gateway.process.reaper import Reaper
from gateway.sandbox import sandbox_state
from gateway.sandbox.choose_provider import choose_provider, find_provider_problem
from gateway.sandbox.confined_process import SandboxEnded
from gateway.sandbox.provider import LocalSandbox
from gateway.sandbox.sandbox_settings import SandboxSettings
from mtrl_plugins.sandboxes import machines
from tests.plugins.sandboxes.conftest import MOST, Served
from tests.plugins.sandboxes.test_sandbox_providers import engine_calls
from tests.sandbox.roots import make_root, shell


@pytest.mark.parametrize("name", ["engine", "server"])
async def test_files_outlive_processes_with_each_provider(
    name: str, request: pytest.FixtureRequest, reaper: Reaper
) -> None:
    chosen = request.getfixturevalue(name)
    settings = chosen if name == "engine" else chosen[0]
    provider = choose_provider(settings, reaper)
    first = await provider.start(settings, keeps_files=True)
    await shell(first, "echo 1 > a; mkdir b; ln -s ../a b/link; sleep 1000 &")
    kept = await first.freeze()
    for _ in range(2):
        second = await provider.start(settings, files_of=kept)
        assert await shell(second, "cat a b/link; rm a; cat /proc/[0-9]*/cmdline | grep -c '[s]leep'") == "1\n1\n0"
        await second.stop()
    await kept.close()


async def test_files_of_a_container_whose_processes_ended_it_are_its_own_loss(
    engine: SandboxSettings, reaper: Reaper
) -> None:
    box = await choose_provider(engine, reaper).start(engine, keeps_files=True)
    for act in (lambda: box.run_python("import os; os.kill(os.getppid(), 9)", 5.0), box.freeze):
        with pytest.raises(SandboxEnded):
            await act()


async def test_server_of_sandboxes_has_roots_of_its_own_and_keeps_frozen_files_with_a_lease(
    server: Served, reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, running = server
    rooted = settings.model_copy(update={"root": make_root(tmp_path, monkeypatch)})
    provider = choose_provider(rooted, reaper)
    box = await provider.start(rooted, keeps_files=True)
    assert await shell(box, "cat /etc/motd; echo new > /etc/motd") == "hello"
    kept = await box.freeze()
    again = await provider.start(rooted, files_of=kept)
    assert await shell(again, "cat /etc/motd") == "new"
    await again.stop()
    await kept.close()
    assert not running.leases
    with pytest.raises(Unavailable, match="no root 'other'"):
        await provider.start(rooted.model_copy(update={"root": "other"}))
    with pytest.raises(Unavailable, match="no such sandbox"):
        await provider.start(rooted, files_of=kept)


async def test_files_of_a_sandbox_on_a_server_outlive_processes_that_were_ended(server: Served, reaper: Reaper) -> None:
    settings, running = server
    provider = choose_provider(settings, reaper)
    for command in ("echo 1 > a; kill -9 -1", "echo 1 > a; kill -STOP $PPID; sleep 600"):
        box = await provider.start(settings, keeps_files=True)
        with anyio.fail_after(10), pytest.raises(SandboxEnded):
            await box.run(("sh", "-c", command), b"", 1.0)
        assert not box.alive
        kept = await box.freeze()
        again = await provider.start(settings, files_of=kept)
        assert await shell(again, "cat a") == "1"
        await again.stop()
        await kept.close()
    assert not running.leases


async def test_frozen_files_take_no_place_of_a_sandbox_on_a_server(
    server: Served, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, running = server
    monkeypatch.setattr(machines, "QUEUE_S", 0.1)
    provider = choose_provider(settings, reaper)
    kept = [await (await provider.start(settings, keeps_files=True)).freeze() for _ in range(MOST)]
    boxes = [await provider.start(settings, files_of=files) for files in kept]
    with pytest.raises(Unavailable, match="are in use"):
        await provider.start(settings)
    for box in boxes:
        await box.stop()
    for files in kept:
        await files.close()
    assert not running.leases


async def test_container_that_packs_too_slowly_is_no_loss_of_the_policys(
    engine: SandboxSettings, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await choose_provider(engine, reaper).start(engine, keeps_files=True)
    monkeypatch.setattr(sandbox_state, "PACK", "import time; time.sleep(600)")
    monkeypatch.setattr(sandbox_state, "PACK_S", 0.5)
    with pytest.raises(Unavailable, match="time limit"):
        await box.freeze()


async def test_container_whose_files_are_more_than_a_state_may_have_keeps_them(
    engine: SandboxSettings, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_state, "MAX_BYTES", 1)
    box = await choose_provider(engine, reaper).start(engine, keeps_files=True)
    await shell(box, "echo 1 > a")
    await (await box.freeze()).close()


async def test_container_whose_start_is_cancelled_is_removed(
    engine: SandboxSettings, reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anyio.CancelScope() as scope:

        async def cancel(self: LocalSandbox, env: object) -> None:
            scope.cancel()
            await lowlevel.checkpoint()

        monkeypatch.setattr(LocalSandbox, "set_environment", cancel)
        await choose_provider(engine, reaper).start(engine)
    assert scope.cancelled_caught
    assert [words[0] for words in engine_calls(tmp_path)][-1] == "rm"


async def test_engine_gets_the_words_for_a_root_and_is_told_where_it_cannot_run_it(
    engine: SandboxSettings, reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = str(engine.provider.engine)  # type: ignore[union-attr]
    values = {"root": make_root(tmp_path, monkeypatch), "container": {"engine": command}}
    settings = SandboxSettings.model_validate(values)
    assert "cannot run a `root`" in str(find_provider_problem(settings))
    with pytest.raises(Unavailable):
        await choose_provider(settings, reaper).start(settings)
    assert any("--rootfs" in words for words in engine_calls(tmp_path))
