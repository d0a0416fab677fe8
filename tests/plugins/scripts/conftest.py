"""Scripts that confined bash reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtrl_plugins.scripts import confine
from mtrl_plugins.scripts.launches import Launch
from mtrl_plugins.scripts.script_reader import ScriptReader
from mtrl_plugins.verl.read_config import is_training
from tests.conftest import Write

ReadScript = Callable[..., list[Launch]]


@pytest.fixture
def read_script(write: Write) -> ReadScript:
    """Reads the training commands of a script's text."""

    def read(text: str, deadline_s: float = confine.DEADLINE_S) -> list[Launch]:
        file = write("run.sh", text)
        return ScriptReader(tell=lambda line: None, deadline_s=deadline_s).read_all(Path(file.name), is_training)

    return read
