"""A user's folder, files that say `import verl` in it, and nothing left of them after the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Write
from tests.imported import fresh

__all__ = ["fresh"]

Lay = Callable[[dict[str, str]], Path]


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """That of the trainer, which plays most of these."""
    return str(request.param)


@pytest.fixture
def lay(tmp_path: Path, write: Write) -> Lay:
    """Writes files under the folder that the test works in, by their names; gives the folder."""

    def lay(files: dict[str, str]) -> Path:
        for name, text in files.items():
            write(name, text)
        return tmp_path

    return lay
