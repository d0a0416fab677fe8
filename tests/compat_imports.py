"""A fixture that resets the stand-ins for verl and ms-swift around each test; imported by conftests that need it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mtrl_plugins.swift import orm, schedulers
from mtrl_plugins.swift.compat_names import FINDER as SWIFT
from mtrl_plugins.verl.compat_names import FINDER as VERL

REGISTRIES = (schedulers.multi_turns, schedulers.envs, schedulers.context_managers, orm.orms)
"""Registries that ms-swift's plugin files modify."""


@pytest.fixture(autouse=True)
def fresh_compat_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for finder in (VERL, SWIFT):
        monkeypatch.setattr(finder, "folders", set())
        monkeypatch.setattr(finder, "packages", set())
    _forget_modules()
    with _restored_registries():
        yield
    _forget_modules()


@contextmanager
def _restored_registries() -> Iterator[None]:
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, known in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(known)


def _forget_modules() -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("verl", "swift"):
            del sys.modules[name]
