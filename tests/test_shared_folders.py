"""What several processes of a test run share is built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_folders import VARIABLE, build_once

PROGRAM = """
import time
from pathlib import Path
from tests.shared_folders import build_once

def build(folder):
    with open("builds", "a") as file:
        file.write("built\\n")
    time.sleep(0.2)  # in which the other would begin, too
    (folder / "whole").touch()

assert (build_once("thing", build) / "whole").exists()
"""


def test_processes_that_need_the_same_folder_at_once_build_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "shared"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=tmp_path) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "built\n"


def test_folder_that_could_not_be_built_is_built_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        build_once("thing", fail)
    assert [file.name for file in build_once("thing", lambda folder: (folder / "whole").touch()).iterdir()] == ["whole"]
