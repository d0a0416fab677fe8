"""Fixtures of the tests of Harbor tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.roots import make_root


@pytest.fixture(scope="module", autouse=True)
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tree of busybox, which is also the root of this name."""
    folder = tmp_path_factory.mktemp("roots")
    with pytest.MonkeyPatch.context() as patch:
        make_root(folder, patch)
        yield folder / "tree"
