"""Servers whose large prepared state lies under an overlay: it acts as a copy does, and nothing is left of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from gateway.config.models import Server
from gateway.errors import Unavailable
from gateway.mcp_client import state_overlay
from gateway.mcp_client.mcp_session import McpSession
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.state_overlay import find_copy_reason
from gateway.sandbox.disk_watch import DISK_WATCH
from gateway.state import prepared_state
from gateway.state.state_hash import hash_state
from gateway.toolset import Session, hash_session_state
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.mcp_client.mcp_toolsets import open_toolset
from tests.waiting import PATIENCE_S, wait_until

CODE_SERVER = str(Path(__file__).with_name("code_server.py"))
ISOLATIONS: tuple[Literal["process", "sandbox"], ...] = ("process", "sandbox")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state that counts as large."""
    folder = tmp_path / "state"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "note.txt").write_text("as it was")
    (folder / "deep" / "a").write_text("a")
    (folder / "deep" / "link").symlink_to("../note.txt")
    monkeypatch.setattr(prepared_state, "LARGE_FILES", 1)
    for isolation in ISOLATIONS:
        if reason := find_copy_reason(Server(command="x", isolation=isolation), folder):
            pytest.skip(f"states are copied here: {reason}")
    return folder


@asynccontextmanager
async def open_server(state: Path, **config: Any) -> AsyncIterator[McpToolset]:
    fields = {"args": (CODE_SERVER, "${MTRL_ROLLOUT_DIR}"), "state": state, **config}
    with anyio.fail_after(PATIENCE_S):
        async with open_toolset(Server(command=sys.executable, **fields)) as server:
            yield server


async def run(session: Session, code: str) -> ToolResult:
    return await session.call(ToolCall("1", "run", json.dumps({"code": code})))


async def text(session: Session, code: str) -> str:
    result = await run(session, code)
    assert result.outcome is Outcome.OK, result
    return result.text


async def find_folder(session: Session) -> str:
    return bytes.fromhex(await text(session, "told = str(folder).encode().hex()")).decode()


def mounts_of(folder: str) -> list[str]:
    """What processes have mounted in a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/mounts"):
        try:
            found += [line for line in file.read_text().splitlines() if line.split()[1].startswith(folder)]
        except OSError:
            continue
    return found


EDIT = """
(folder / 'note.txt').write_text(f'changed in {folder}')
os.rename(folder / 'deep', folder / 'moved')
os.unlink(folder / 'moved' / 'a')
(folder / 'new').mkdir()
(folder / 'new' / 'program').write_text('run')
(folder / 'new' / 'program').chmod(0o755)
"""


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_rollouts_change_only_what_is_theirs_and_end_with_the_hash_of_a_copy(
    isolation: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, hashes = hash_state(state), []
    copied = shutil.copytree(state, tmp_path / "copied", symlinks=True)
    async with open_server(state, isolation=isolation) as server:
        async with server.open(Task("a", hash_state=True)) as first, server.open(Task("b")) as second:
            folder = Path(await find_folder(first))
            await text(first, EDIT)
            seen = "told = (folder / 'note.txt').read_text(), sorted(os.listdir(folder))"
            assert await text(second, seen) == "('as it was', ['deep', 'note.txt'])"
            assert sorted(os.listdir(folder)) == ["lower", "upper", "work"]
            hashes.append(await hash_session_state(first))
        await wait_until(lambda: not folder.exists() and not mounts_of(str(folder)))
    assert hash_state(state) == before
    monkeypatch.setattr(state_overlay, "_find_reason", lambda *_: "it is to be copied")
    async with open_server(copied, isolation=isolation) as server, server.open(Task("a", hash_state=True)) as session:
        await text(session, EDIT)
        hashes.append(await hash_session_state(session))
    assert hashes[0] is not None and hashes[0] == hashes[1]


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_hash_reads_nothing_outside_of_the_state(isolation: str, state: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "objects").mkdir(parents=True)
    plant = f"""
targets = {{'file': '{outside}/secret', 'all': '{outside}', 'up': '../../../..', 'd-wal': '{outside}/secret'}}
for name, target in targets.items():
    os.symlink(target, folder / name)
import sqlite3
sqlite3.connect(folder / 'd').executescript('create table t (x); insert into t values (1)')
(folder / '.git').mkdir()
(folder / '.git' / 'HEAD').write_text('ref: refs/heads/main')
os.symlink('{outside}/objects', folder / '.git' / 'objects')
(folder / '.git' / 'refs').mkdir()
"""
    hashes = []
    async with open_server(state, isolation=isolation) as server:
        for secret in ("one", "two"):
            (outside / "secret").write_text(secret)
            (outside / "objects" / "pack").write_text(secret)
            async with server.open(Task("a", hash_state=True)) as session:
                await text(session, plant)
                hashes.append(await hash_session_state(session))
    assert hashes[0] is not None and hashes[0].startswith("sha256:") and hashes[0] == hashes[1]


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_server_that_is_killed_leaves_no_mounts(isolation: str, state: Path) -> None:
    async with open_server(state, isolation=isolation) as server, server.open(Task("a", hash_state=True)) as session:
        folder = await find_folder(session)
        assert mounts_of(folder)
        connection = session._connection if isinstance(session, McpSession) else None
        assert connection is not None and connection.transport.mounted_by is not None
        os.kill(connection.transport.mounted_by, signal.SIGKILL)
        await wait_until(lambda: not mounts_of(folder))
        with pytest.raises(Unavailable, match="state at the end"):
            await hash_session_state(session)
    assert (state / "note.txt").read_text() == "as it was"


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_gateway_that_is_killed_leaves_no_mounts_and_no_folder(isolation: str, state: Path) -> None:
    script = f"""
import anyio
from pathlib import Path
from gateway.state import prepared_state
from gateway.types import Task
from tests.state.test_server_overlays import open_server, text
prepared_state.LARGE_FILES = 1
async def main():
    async with open_server(Path({str(state)!r}), isolation={isolation!r}) as server, server.open(Task()) as session:
        print(await text(session, "told = str(folder).encode().hex()"), flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
    before = hash_state(state)
    gateway = await anyio.open_process([sys.executable, "-c", script], stderr=None, cwd=Path(__file__).parents[2])
    assert gateway.stdout is not None
    with anyio.fail_after(PATIENCE_S):
        folder = Path(bytes.fromhex((await gateway.stdout.receive()).decode()).decode())
        assert mounts_of(str(folder))
        os.kill(gateway.pid, signal.SIGKILL)
        await gateway.wait()
    await gateway.aclose()
    await wait_until(lambda: not mounts_of(str(folder)) and not folder.exists())
    assert hash_state(state) == before


def look_at_disks() -> None:
    """Looks at the folders of all sandboxes, as the watch does twice a second."""
    for disk in DISK_WATCH._watched:
        disk.look()


WRITE = {
    "in files": "for n in range(5): (folder / f'{n}').write_bytes(bytes(2**21))",
    "in removed files": (
        "kept = []\nfor n in range(5):\n f = open(folder / 'f', 'wb', 0); f.write(b'x' * 2**21); kept.append(f)\n"
        " os.unlink(folder / 'f')"
    ),
    "in mapped files": (
        "import mmap\nkept = []\nfor n in range(5):\n with open(folder / 'f', 'wb+') as f:\n"
        "  f.write(b'x' * 2**21); f.flush(); kept.append(mmap.mmap(f.fileno(), 2**21))\n os.unlink(folder / 'f')"
    ),
}


@pytest.mark.parametrize("trick", WRITE)
async def test_sandboxed_server_may_change_large_files_and_not_add_more_than_its_limit(trick: str, state: Path) -> None:
    for number in range(3):
        (state / f"large{number}").write_bytes(b"x" * 3 * 2**20)
    config = {"isolation": "sandbox", "sandbox": {"disk_mb": 4}}
    async with open_server(state, **config) as server, server.open(Task("a")) as session:
        await text(session, "for n in range(3): f = open(folder / f'large{n}', 'r+b'); f.write(b'y'); f.close()")
        await anyio.to_thread.run_sync(look_at_disks)
        assert await text(session, "told = (folder / 'large0').read_bytes()[:2]") == "b'yx'"
        result = await run(session, f"{WRITE[trick]}\nimport time; time.sleep(600)")
    assert result.outcome is Outcome.ERROR and "more than 4 MB" in str(result.reason), result


PRINT_REASON = """
import sys
from pathlib import Path
from gateway.config.models import Server
from gateway.mcp_client.state_overlay import find_copy_reason
from gateway.state import prepared_state
prepared_state.LARGE_FILES = 1
print(find_copy_reason(Server(command="x", isolation="process"), Path(sys.argv[1])))
"""


def test_state_is_copied_for_what_an_overlay_cannot_do(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "large").write_bytes(bytes(5 * 2**20))
    base: dict[str, Any] = {"command": "x", "isolation": "sandbox"}
    assert "`disk_mb`" in find_copy_reason(Server(**base, sandbox={"disk_mb": 4}), state)
    assert not find_copy_reason(Server(**base, sandbox={"disk_mb": 5}), state)
    assert "`keep_state`" in find_copy_reason(Server(**base, keep_state=tmp_path / "kept"), state)
    other = shutil.copytree(state, tmp_path / "owners", symlinks=True)
    os.chown(other / "note.txt", 60_600, 60_600)
    assert "another owner" in find_copy_reason(Server(**base), other)
    mounted = shutil.copytree(state, tmp_path / "mounted", symlinks=True)
    script = f"mount -t tmpfs none {mounted}/deep && exec {sys.executable} -c '{PRINT_REASON}' {mounted}"
    root = Path(__file__).parents[2]
    done = subprocess.run(("unshare", "-m", "sh", "-c", script), capture_output=True, text=True, check=False, cwd=root)
    assert "deep lies on another file system" in done.stdout, done
    if os.stat("/dev/shm").st_dev != state.stat().st_dev:
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
        apart = shutil.copytree(state, tmp_path / "apart", symlinks=True)
        assert "another file system than /dev/shm" in find_copy_reason(Server(**base), apart)
        assert not find_copy_reason(Server(command="x", isolation="process"), apart)
        monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    unprivileged = shutil.copytree(state, tmp_path / "unprivileged", symlinks=True)
    assert "only a gateway of root" in find_copy_reason(Server(**base), unprivileged)
