"""Scripts that are read with each way to confine bash that works here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtrl_plugins.scripts import confine
from mtrl_plugins.scripts.launches import Launch
from mtrl_plugins.scripts.script_reader import ScriptReader
from mtrl_plugins.verl.read_config import is_training
from tests.conftest import Write
from tests.plugins.scripts.confinements import WORKING

ReadScript = Callable[..., list[Launch]]


@pytest.fixture(params=WORKING, ids=lambda start: start.__name__)
def read_script(request: pytest.FixtureRequest, write: Write, monkeypatch: pytest.MonkeyPatch) -> ReadScript:
    """Reads the training commands of a script's text."""
    monkeypatch.setattr(confine, "confinement", lambda: request.param)

    def read(text: str, deadline_s: float = confine.DEADLINE_S) -> list[Launch]:
        file = write("run.sh", text)
        return ScriptReader(tell=lambda line: None, deadline_s=deadline_s).read_all(Path(file.name), is_training)

    return read
