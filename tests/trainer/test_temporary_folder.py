"""Folders that a killed process left on a disk are removed by the next process; those of living writers stay."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pytest

from tests.trainer.engine_sglang.fake_sglang import weights
from tests.trainer.processes import run_process, wait_until
from trainer.engine.sglang.weight_sync.disk import DiskSync
from trainer.storage.temporary_folder import ABANDONED_S, LOCK

PUBLISH = '''
"""Publishes weights to a server that never answers."""
import sys
from pathlib import Path
from types import SimpleNamespace

import anyio
import torch

from trainer.engine.sglang.http_client import SGLangClient
from trainer.engine.sglang.weight_sync.base import SyncTarget
from trainer.engine.sglang.weight_sync.disk import DiskSync

async def publish():
    sync, weights = DiskSync(Path(sys.argv[2]), Path("shared")), {"a": torch.ones(9)}
    async with SGLangClient(sys.argv[1]) as client:
        await sync.send([SyncTarget(client, SimpleNamespace(has_draft=False))], weights, 7, True)

anyio.run(publish)
'''


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "publish.py").write_text(PUBLISH)
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@contextmanager
def publishing(shared: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process in the midst of a publish: the weights are in its folder, and it waits for the server."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = {*shared.iterdir()}
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with run_process(shared.parent, "publish.py", url, "model") as process:
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                (folder,) = {*shared.iterdir()} - before
                assert (folder / "model.safetensors.index.json").is_file()
                yield process, folder


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    wait_until(lambda: process.poll() is not None, process)


@pytest.fixture
def left(shared: Path) -> Path:
    """The folder that a killed publish left."""
    with publishing(shared) as (process, folder):
        kill(process)
    assert folder.is_dir()
    return folder


def publish(shared: Path) -> None:
    anyio.run(DiskSync(shared.parent / "model", shared).send, [], weights(1), 8, True)


def age(folder: Path, seconds: float) -> None:
    changed = (folder / LOCK).stat().st_mtime - seconds
    os.utime(folder / LOCK, (changed, changed))


def test_next_publish_removes_the_folder_of_a_killed_one_and_leaves_that_of_a_living_one(shared: Path) -> None:
    with ExitStack() as stack:
        killed, left = stack.enter_context(publishing(shared))
        _, living = stack.enter_context(publishing(shared))
        kill(killed)
        age(living, 2 * ABANDONED_S)
        content = sorted(living.iterdir())
        publish(shared)
        assert not left.exists() and sorted(living.iterdir()) == content


def test_folder_of_another_machine_is_removed_only_when_it_is_old(shared: Path, left: Path) -> None:
    """Its lock can be taken, but not every file system shows the locks of other machines."""
    (left / LOCK).write_text("another-kernel 1")
    publish(shared)
    assert left.is_dir()
    age(left, 2 * ABANDONED_S)
    publish(shared)
    assert not left.exists()


def test_without_locks_weights_are_published_and_folders_removed_only_when_they_are_old(
    shared: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    publish(shared)
    assert [*shared.iterdir()] == [left]
    age(left, 2 * ABANDONED_S)
    publish(shared)
    assert not left.exists()
