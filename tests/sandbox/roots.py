"""Root file systems for tests: a tree of busybox, and archives as container engines write them."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from gateway.sandbox.provider import Sandbox
from gateway.sandbox.roots import add_root

ROOT = "busybox"


def make_tree(folder: Path) -> Path:
    """A small Linux without Python: busybox under all its names."""
    busybox = shutil.which("busybox")
    assert busybox, "the tests need busybox: `make packages` installs it"
    for name in ("bin", "etc", "tmp", "app", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    shutil.copy(busybox, folder / "bin/busybox")
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in {*names} - {"busybox", "bash"}:
        (folder / "bin" / name).symlink_to("busybox")
    for name, line in (
        ("bash", 'exec /bin/sh "$@"'),
        ("matches", 'exec grep -qx -- "$1" "$2"'),
    ):  # No names of its own.
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "etc/motd").write_text("hello\n")
    return folder


def export(folder: Path, archive: Path) -> Path:
    """An archive of a tree, as `docker export` writes it."""
    with tarfile.open(archive, "w") as tar:
        tar.add(folder, ".")
    return archive


def make_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Adds the root `busybox` to a data folder of its own; returns its name."""
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    add_root(ROOT, export(make_tree(folder / "tree"), folder / "tree.tar"))
    return ROOT


def make_layer(members: Sequence[tarfile.TarInfo | tuple[str, bytes]]) -> bytes:
    """A layer of members: headers, or names with contents."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                header = tarfile.TarInfo(member[0])
                header.size, header.mode = len(member[1]), 0o755
                tar.addfile(header, io.BytesIO(member[1]))
    return packed.getvalue()


def make_link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """The header of a link, or of what else has no content."""
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


def save(archive: Path, layers: Sequence[bytes], kind: str = "docker", **about: object) -> Path:
    """An image, as `docker save` or an OCI tool writes it."""
    config = json.dumps({"os": "linux", "config": {"Env": ["PLACE=image"], "WorkingDir": "/app"}, **about}).encode()
    blobs = {f"blobs/sha256/{sha256(blob).hexdigest()}": blob for blob in (*layers, config)}
    names = [*blobs]
    if kind == "docker":
        files: Mapping[str, object] = {"manifest.json": [{"Config": names[-1], "Layers": names[:-1]}]}
    else:
        entries = [{"digest": name.removeprefix("blobs/").replace("/", ":")} for name in names]
        manifest = json.dumps({"config": entries[-1], "layers": entries[:-1]}).encode()
        digest = sha256(manifest).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = manifest
        index = {"manifests": [{"digest": f"sha256:{digest}", "platform": {"os": "linux"}}]}
        files = {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": index}
    packed = {**blobs, **{name: json.dumps(value).encode() for name, value in files.items()}}
    archive.write_bytes(make_layer([*packed.items()]))
    return archive


async def shell(box: Sandbox, command: str) -> str:
    """What a command prints inside a box."""
    done = await box.run(("sh", "-c", f"({command}) 2>&1"), b"", 20.0)
    assert not done.stopped, done
    return done.stdout.strip()
