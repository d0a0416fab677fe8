"""What one test imports, and may import, is not the next one's: a folder of tests takes `fresh` into its conftest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from gateway.verl.importing import FINDER as VERL
from trainer.swift import gym, orm
from trainer.swift.importing import FINDER as SWIFT

REGISTRIES = (gym.multi_turns, gym.envs, gym.context_managers, orm.orms)
"""What files of ms-swift's write themselves into."""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for finder in (VERL, SWIFT):
        monkeypatch.setattr(finder, "folders", set())
        monkeypatch.setattr(finder, "packages", set())
    _forget(tmp_path)
    with _kept():
        yield
    _forget(tmp_path)


@contextmanager
def _kept() -> Iterator[None]:
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, known in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(known)


def _forget(folder: Path) -> None:
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in ("verl", "swift") or _lies_in(folder, module):
            del sys.modules[name]


def _lies_in(folder: Path, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    places = [getattr(spec, "origin", None), *(getattr(spec, "submodule_search_locations", None) or ())]
    return any(str(place).startswith(str(folder)) for place in places)
