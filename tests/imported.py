"""What stands in for verl and ms-swift in one test does not in the next: a folder of tests takes `fresh` into its
conftest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.verl.importing import FINDER as VERL
from trainer.swift import gym, orm
from trainer.swift.importing import FINDER as SWIFT

REGISTRIES = (gym.multi_turns, gym.envs, gym.context_managers, orm.orms)
"""What files of ms-swift's write themselves into."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for finder in (VERL, SWIFT):
        monkeypatch.setattr(finder, "folders", set())
        monkeypatch.setattr(finder, "packages", set())
    _forget()
    with _kept():
        yield
    _forget()


@contextmanager
def _kept() -> Iterator[None]:
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, known in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(known)


def _forget() -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("verl", "swift"):
            del sys.modules[name]
