"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from typer.testing import Result

    from tests.trainer.cli_data import RunCommand


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products are several times slower when threads share them."""
    import torch  # only where a test asks for it: most do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    from tests.trainer.model_folders import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    """Where a person is who types commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunCommand:
    """Runs a command to the exit code that is expected."""
    from typer.testing import CliRunner

    from trainer.cli import app

    def run(*words: object, code: int = 0) -> Result:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
        return done

    return run
