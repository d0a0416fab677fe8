"""Every block of docs/harbor.md does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.sandbox.roots import add_root
from tests.docs.conftest import Follow
from tests.sandbox.roots import export, make_tree


def test_harbor_page(follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    add_root("busybox-1.37", export(make_tree(tmp_path / "tree"), tmp_path / "box.tar"))
    done = follow("docs/harbor.md", no_servers=True)
    assert "1 task of tasks; public hosts: none; the solutions of answer are worth 1" in done["mtrl-train --config"]
