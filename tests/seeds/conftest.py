"""Fixtures for users' files: writing them to a folder, and resetting the stand-ins for verl and ms-swift."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat_imports import fresh_compat_imports
from tests.conftest import Write

__all__ = ["fresh_compat_imports"]

Lay = Callable[[dict[str, str]], Path]


@pytest.fixture
def lay(tmp_path: Path, write: Write) -> Lay:
    """A function that writes files by name into the test's folder, and returns the folder."""

    def lay(files: dict[str, str]) -> Path:
        for name, text in files.items():
            write(name, text)
        return tmp_path

    return lay
