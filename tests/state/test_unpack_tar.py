"""Tests that archives are unpacked alike with and without the filters that Python has since 3.11.4."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.state.unpack_tar import unpack_tar
from tests.sandbox.roots import make_layer, make_link

OUTSIDE = {
    "a name": [("../out", b"hello")],
    "a link": [make_link("away", "/etc")],
    "a relative link": [make_link("inner/away", "../../out")],
    "a hard link": [make_link("away", "../out", tarfile.LNKTYPE)],
    "a device": [make_link("special", "", tarfile.CHRTYPE)],
    "a link by a link": [make_link("here", "."), make_link("here/up", "..")],
}


@pytest.fixture(params=["filters", "none"])
def unpack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, Path], None]:
    if request.param == "none":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)

    def run(packed: bytes, folder: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            unpack_tar(archive, folder)

    return run


def test_files_folders_and_links_inside_are_unpacked(unpack: Callable[[bytes, Path], None], tmp_path: Path) -> None:
    suid = tarfile.TarInfo("inner/suid")
    suid.mode = 0o4755
    links = make_link("short", "inner/file"), make_link("inner/back", "../short")
    unpack(make_layer([("inner/file", b"hello"), *links, suid]), tmp_path)
    assert (tmp_path / "inner/back").read_text() == "hello" and (tmp_path / "short").is_symlink()
    assert not (tmp_path / "inner/suid").stat().st_mode & 0o6022


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_leads_out_is_refused(name: str, unpack: Callable[[bytes, Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(tarfile.TarError):
        unpack(make_layer(OUTSIDE[name]), folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
