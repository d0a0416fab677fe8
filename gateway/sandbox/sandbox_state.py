"""The state of a sandbox: what is there at the end is packed and hashed.

Bubblewrap mounts a prepared state (`state_mount.py`); into other sandboxes it is packed and put at their start. What
comes out was written by the policy, so that it is unpacked by hand, and nothing is written through a link. A state has
one hash, wherever it is: the law of `state_hash.py`.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import anyio
from anyio import to_thread

from gateway.errors import Unavailable
from gateway.process.reaper import Reaper
from gateway.sandbox import state_archive
from gateway.sandbox.command_server import TOO_LONG
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled
from gateway.sandbox.provider import Sandbox
from gateway.sandbox.sandbox_layout import ROLLOUT
from gateway.state.prepared_state import PreparedStates, StateError
from gateway.state.remove_folder import remove_folder

MAX_BYTES = 40 * 2**20
"""A packed state is one message."""
PACK_S = 30.0
ARCHIVE = "/tmp/.state.tar"  # noqa: S108 - inside
PREFIX = "mtrl-rollout-"
PYTHON_OPTIONS = ("-I", "-S", "-c")
UNPACK = f"""
import os, sys, tarfile
tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)  # The state is the operator's own.
tarfile.open({ARCHIVE!r}).extractall(sys.argv[1])
os.remove({ARCHIVE!r})
"""
PACK = Path(state_archive.__file__).read_text(encoding="utf-8")
"""The script itself: no file of the gateway is seen on other machines."""


class SandboxStates:
    """The prepared states of an entry's sandboxes."""

    def __init__(self, prepared: PreparedStates, reaper: Reaper) -> None:
        self.prepared, self._reaper = prepared, reaper

    async def put(self, sandbox: Sandbox, state: Path) -> None:
        """Puts a state into a new sandbox; raises Unavailable."""
        try:
            await unpack_files(sandbox, await to_thread.run_sync(pack_state, state))
        except (StateError, OSError, SandboxEnded, SandboxKilled) as error:
            raise Unavailable(f"the `state` cannot be put into the sandbox: {error}") from error

    async def hash(self, sandbox: Sandbox | None, name: str) -> str:
        """The hash of what is in the sandbox; of the prepared state if none was started. Raises Unavailable.

        A sandbox whose content cannot be packed has a hash that no state has: the policy filled or ended it.
        """
        if sandbox is None:
            return await self.prepared.hash_prepared(name)
        try:
            packed = await pack_files(sandbox)
        except SandboxKilled as error:
            raise Unavailable(f"the state at the end was lost: {error}") from error
        except (OSError, SandboxEnded) as error:
            return f"not packed: {error}"
        return await self.hash_packed(packed)

    async def hash_packed(self, packed: bytes) -> str:
        """The hash of an archive's content; one that cannot be unpacked has a hash that no state has."""
        if len(packed) > MAX_BYTES:
            return f"not packed: it has more than {MAX_BYTES // 2**20} MB"
        await self._reaper.start()
        folder = Path(await to_thread.run_sync(tempfile.mkdtemp, "", PREFIX))
        self._reaper.add_folder(folder)
        try:
            await to_thread.run_sync(unpack, packed, folder)
            return await self.prepared.hash_folder(folder)
        except (tarfile.TarError, OSError, ValueError) as error:
            return f"not packed: {error}"
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(remove_folder, folder)
                self._reaper.remove_folder(folder)


async def pack_files(sandbox: Sandbox, max_bytes: int = MAX_BYTES) -> bytes:
    """What is in `/rollout`, as an archive; raises OSError, SandboxEnded and SandboxKilled, and TimeoutError."""
    done = await sandbox.run((*sandbox.python, *PYTHON_OPTIONS, PACK, ROLLOUT, ARCHIVE), b"", PACK_S)
    if done.stopped == TOO_LONG:
        raise TimeoutError(done.stopped)
    if done.stopped or done.status:
        raise OSError(done.stopped or done.stderr.strip()[-200:])
    return await sandbox.get(ARCHIVE, max_bytes)


async def unpack_files(sandbox: Sandbox, packed: bytes, folder: str = ROLLOUT) -> None:
    """Puts an archive into a folder; raises OSError, SandboxEnded and SandboxKilled."""
    await sandbox.put(ARCHIVE, packed)
    done = await sandbox.run((*sandbox.python, *PYTHON_OPTIONS, UNPACK, folder), b"", PACK_S)
    if done.stopped or done.status:
        raise OSError(f"it cannot be unpacked: {done.stopped or done.stderr.strip()[-200:]}")


def pack_state(state: Path) -> bytes:
    """A folder or a zip as an archive; other archives as they are, since the sandbox reads them."""
    packed = io.BytesIO()
    if state.is_dir():
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(state, "")
    elif state.name.endswith(".zip"):
        with zipfile.ZipFile(state) as zipped, tarfile.open(fileobj=packed, mode="w") as tar:
            for name in zipped.namelist():
                member, content = tarfile.TarInfo(name), b"" if name.endswith("/") else zipped.read(name)
                member.type, member.size = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE, len(content)
                member.mode = 0o755 if name.endswith("/") else 0o644
                tar.addfile(member, io.BytesIO(content))
    else:
        packed.write(state.read_bytes())
    if len(packed.getvalue()) > MAX_BYTES:
        raise StateError(f"{state} has more than {MAX_BYTES // 2**20} MB; make a folder `readable` for more")
    return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Unpacks an archive into an empty folder. Symbolic links come last, so that nothing is written through one, and
    what is no file, folder or link is a pipe. Raises ValueError."""
    links: dict[Path, str] = {}
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
        for member in tar:
            place = _place_inside(folder, member.name)
            if member.isdir():
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                links[place] = member.linkname
            elif member.islnk():
                os.link(_place_inside(folder, member.linkname), place, follow_symlinks=False)
            elif (opened := tar.extractfile(member) if member.isreg() else None) is not None:
                if member.size > len(packed):  # A sparse file may be of any size.
                    raise ValueError(f"{member.name!r:.100} is larger than its archive")
                with place.open("xb") as file:  # Not into a pipe of this name, which would wait for a reader.
                    file.write(opened.read())
                place.chmod(0o700 if member.mode & 0o100 else 0o600)
            else:
                os.mkfifo(place)
    for place, target in links.items():
        place.symlink_to(target)


def _place_inside(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or len(path.parts) > 64:
        raise ValueError(f"{name!r:.100} leads out of the folder")
    return folder / path
