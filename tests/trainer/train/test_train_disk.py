"""The disk and the clock of a training: whatever fails, nothing is torn, one error says what to do, and a resumed run
has the metrics of an undisturbed one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from gateway.tape.record import TapeWriter
from tests.trainer.train.trainings import Run, read_run_metrics, run_in, write_config
from trainer.policy.policy import Policy
from trainer.storage.rollout_file import Rollouts, RolloutWriter

JOB: dict[str, Any] = {"steps": 2, "record": True}
RESUME = "continue with `mtrl-train --resume --out r`"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    return run_in(tmp_path_factory.mktemp("whole"), **JOB)


def fill_disk(file: FileIO) -> None:
    """What is written to the open file from now on meets a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)


def spoil_before(patch: pytest.MonkeyPatch, owner: type, name: str, call: int, spoil: Callable[[Any], None]) -> None:
    """Spoils something before a method's so-manieth call, counted from 1."""
    calls, real = 0, getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            spoil(self)
        return real(self, *args)

    patch.setattr(owner, name, method)


@pytest.mark.parametrize(
    ("owner", "name", "call", "file"),
    [
        (TapeWriter, "write", 9, "r/tapes"),
        (RolloutWriter, "_add", 6, "r/rollouts.jsonl"),
    ],
)
def test_full_disk_in_any_file_ends_the_run_with_one_error_and_it_can_be_resumed(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, file: str
) -> None:
    with monkeypatch.context() as patch:
        spoil_before(patch, owner, name, call, lambda writer: fill_disk(writer._file))
        output = run("--config", write_config(**JOB), "--out", "r", code=2)
    assert f"{file}: cannot be written (No space left on device)\n  remedy: make room on " in output
    assert output.count("cannot be written") == 1 and RESUME in " ".join(output.split()) and "Traceback" not in output
    run("--resume", "--out", "r")
    assert read_run_metrics("r") == read_run_metrics(whole)
    assert [rollout.name for rollout in Rollouts(Path("r"))] == [rollout.name for rollout in Rollouts(whole)]


def remove_at_once(folder: Path) -> None:
    """Removes a folder, whatever is written into it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


@pytest.mark.parametrize(("owner", "name", "call"), [(RolloutWriter, "_add", 6), (Policy, "save", 1)])
def test_removed_run_folder_ends_the_run_with_one_error_and_is_not_made_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int
) -> None:
    with monkeypatch.context() as patch:
        spoil_before(patch, owner, name, call, lambda _: remove_at_once(Path("r")))
        output = run("--config", write_config(**JOB), "--out", "r", code=2)
    assert "was removed while it was in use: restore it from a copy" in " ".join(output.split()), output
    assert "Traceback" not in output and not Path("r").exists()
