"""Every async test of the gateway runs on asyncio and on trio; a test that needs files works in a folder of its own.

No test hands anything on: whatever was tested before it, in whichever order, it finds and draws the same.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from hypothesis import settings

# Tiny products are many times slower when threads share them; whoever tests threads sets their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Whoever runs tests in the background leaves Ctrl-C ignored, and every program that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says something of the machine, and nothing of the law. What fails once fails in every run;
# `pytest --hypothesis-profile wide` draws other examples each time.
settings.register_profile("wide", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def forgotten(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test wrote and imported is not the next one's, whose file may have the same name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if _lies_in(tmp_path_factory.getbasetemp(), sys.modules[name]):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def drawn() -> None:
    """The same in every run. Nobody loads torch for this, which would have begun with its own seed."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file below the working folder, which is empty at first; its text may be indented."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
        return file

    return write


def _lies_in(folder: Path, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    places = [getattr(spec, "origin", None), *(getattr(spec, "submodule_search_locations", None) or ())]
    return any(str(place).startswith(str(folder)) for place in places)
