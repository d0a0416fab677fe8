"""A place for plug-in files, and an interpreter in which no other test's were run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from swift_playing import Write

from trainer.swift import gym, orm
from trainer.swift.importing import FINDER


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def _write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.write_text(dedent(text))
        return file

    return _write


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules, path, hooks = dict(sys.modules), [*sys.path], [*sys.meta_path]
    monkeypatch.setattr(FINDER, "folders", set())
    monkeypatch.setattr(FINDER, "packages", set())
    registries = [gym.multi_turns, gym.envs, gym.context_managers, orm.orms]
    before = [dict(one) for one in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)
    for name in set(sys.modules) - set(modules):
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name.partition(".")[0] == "swift" or "pytest-of" in file:
            del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, hooks
