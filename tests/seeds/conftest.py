"""A user's folder, files that say `import verl` in it, and nothing left of them after the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from gateway.verl.importing import FINDER

# The helpers of the trainer's tests import each other by their bare names.
TRAINER = str(Path(__file__).parents[1] / "trainer")
if TRAINER not in sys.path:
    sys.path.append(TRAINER)

Write = Callable[..., Path]


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """That of the trainer, which plays most of these."""
    return str(request.param)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files under the folder that the test works in, by their names; gives the folder."""
    monkeypatch.chdir(tmp_path)

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text))
        return tmp_path

    return write


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test imports, and may import, is not the next one's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(FINDER, "folders", set())
    monkeypatch.setattr(FINDER, "packages", set())
    yield
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in ("verl", "swift") or _lies_in(tmp_path, module):
            del sys.modules[name]


def _lies_in(folder: Path, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    places = [getattr(spec, "origin", None), *(getattr(spec, "submodule_search_locations", None) or ())]
    return any(str(place).startswith(str(folder)) for place in places)
