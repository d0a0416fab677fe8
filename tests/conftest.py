"""Every async test of the gateway runs on asyncio and on trio; a test that needs files works in a folder of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import settings

# Tiny products are many times slower when threads share them; whoever tests threads sets their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Whoever runs tests in the background leaves Ctrl-C ignored, and every program that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says something of the machine, and nothing of the law.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

Write = Callable[[str, str], Path]


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
