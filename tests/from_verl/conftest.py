"""A working folder for a user's files, and an interpreter in which nothing of verl has been imported yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from gateway.verl.importing import FINDER

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def _write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
        return file

    return _write


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test imports, and may import, is not the next one's."""
    modules, path, hooks = dict(sys.modules), [*sys.path], [*sys.meta_path]
    monkeypatch.setattr(FINDER, "folders", set())
    monkeypatch.setattr(FINDER, "packages", set())
    for name in [name for name in modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    yield
    for name in set(sys.modules) - set(modules):
        if name.partition(".")[0] in ("verl", "theirs", "theirs_too", "rewards"):
            del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, hooks
