"""Tests that archives are unpacked alike with and without the filters that Python has since 3.11.4."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.state.unpack_tar import unpack_tar


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def typed(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("special")
    member.type = kind
    return member


def add_file(archive: tarfile.TarFile, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = 5, 0o4755
    archive.addfile(member, io.BytesIO(b"hello"))


def add_links(archive: tarfile.TarFile, **targets: str) -> None:
    for name, target in targets.items():
        archive.addfile(link(name, target))


OUTSIDE: dict[str, Callable[[tarfile.TarFile], None]] = {
    "a name": lambda archive: add_file(archive, "../out"),
    "a link": lambda archive: archive.addfile(link("away", "/etc")),
    "a relative link": lambda archive: archive.addfile(link("inner/away", "../../out")),
    "a hard link": lambda archive: archive.addfile(link("away", "../out", tarfile.LNKTYPE)),
    "a device": lambda archive: archive.addfile(typed(tarfile.CHRTYPE)),
    "a link by a link": lambda archive: add_links(archive, here=".", **{"here/up": ".."}),
}


@pytest.fixture(params=["filters", "none"])
def unpack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, Path], None]:
    if request.param == "none":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)

    def run(packed: bytes, folder: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            unpack_tar(archive, folder)

    return run


def pack(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        fill(archive)
    return buffer.getvalue()


def test_files_folders_and_links_inside_are_unpacked(unpack: Callable[[bytes, Path], None], tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        add_file(archive, "inner/file")
        archive.addfile(link("short", "inner/file"))
        archive.addfile(link("inner/back", "../short"))

    unpack(pack(fill), tmp_path)
    assert (tmp_path / "inner/back").read_text() == "hello" and (tmp_path / "short").is_symlink()
    assert not (tmp_path / "inner/file").stat().st_mode & 0o6022


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_leads_out_is_refused(name: str, unpack: Callable[[bytes, Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(tarfile.TarError):
        unpack(pack(OUTSIDE[name]), folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
