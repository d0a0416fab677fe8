"""The disk and the clock of a training: whatever fails, nothing is torn, one error says what to do, and a resumed run
has the metrics of an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.tape.record import TapeWriter
from tests.trainer.processes import TIMEOUT_S, run_process
from tests.trainer.train.trainings import Run, read_run_metrics, write_config
from trainer.cli import app
from trainer.policy.policy import Policy
from trainer.storage.rollout_file import ROLLOUTS_FILE, Rollouts, RolloutWriter
from trainer.storage.run_files import METRICS_FILE, MetricsWriter
from trainer.train.checkpoint import CheckpointError, Checkpoints
from trainer.train.run_folder import newest_run

JOB: dict[str, Any] = {"steps": 2, "record": True}
RESUME = "continue with `mtrl-train --resume --out r`"
DISK_BYTES = 64_000_000
FREE_BYTES = 300_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["--config", write_config(**JOB), "--out", "r"])
        assert done.exit_code == 0, done.output
    return folder / "r"


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
        (MetricsWriter, "add", 2, "r/metrics.jsonl"),
    ],
)
def test_full_disk_in_any_file_ends_the_run_with_one_error_and_it_can_be_resumed(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, file: str
) -> None:
    with monkeypatch.context() as patch:
        spoil_before(patch, owner, name, call, lambda writer: fill_disk(writer._file))
        output = run("--config", write_config(**JOB), "--out", "r", code=2)
    assert f"{file}: cannot be written (No space left on device)\n  remedy: make room on " in output
    assert output.count("remedy") == 1 and RESUME in " ".join(output.split()) and "Traceback" not in output
    run("--resume", "--out", "r")
    assert read_run_metrics("r") == read_run_metrics(whole)
    assert [rollout.name for rollout in Rollouts(Path("r"))] == [rollout.name for rollout in Rollouts(whole)]


@pytest.mark.parametrize(
    ("owner", "name", "call"), [(TapeWriter, "write", 9), (RolloutWriter, "_add", 6), (Policy, "save", 1)]
)
def test_removed_run_folder_ends_the_run_with_one_error_and_is_not_made_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int
) -> None:
    with monkeypatch.context() as patch:
        spoil_before(patch, owner, name, call, lambda _: shutil.rmtree("r"))
        output = run("--config", write_config(**JOB), "--out", "r", code=2)
    assert "was removed while it was in use: restore it from a copy" in " ".join(output.split()), output
    assert "Traceback" not in output and not Path("r").exists()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "make room on "),
        (RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0"), "check the disk of "),
        (OSError(30, "Read-only file system"), "make .* writable for this user"),
        (RuntimeError("File too large (os error 27)"), "raise the limit on the size of files"),
    ],
)
def test_checkpoint_error_has_a_remedy_with_and_without_errno(tmp_path: Path, error: Exception, remedy: str) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {}, lambda folder: None)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=rf"remedy: {remedy}(?s:.*)mtrl-train --resume"):
            checkpoints.save(step, {}, fail)
        found = checkpoints.find_latest()
        assert found is not None and found.step == 1, "the last good one is kept"


ON_SMALL_DISK = f"""
set -u
head -c {DISK_BYTES - FREE_BYTES} /dev/zero > disk/filler || exit 90
{sys.executable} -m trainer.cli --config run.yaml --out disk/r
echo "ended with $?"
rm disk/filler
{sys.executable} -m trainer.cli --resume --out disk/r || exit 91
cp -r disk/r kept
"""


def on_small_disk(folder: Path, script: Path) -> list[str]:
    """The command that runs a script with a small disk in place of a folder."""
    confined = ["bwrap", "--dev-bind", "/", "/", "--size", str(DISK_BYTES), "--tmpfs", str(folder)]
    if shutil.which("bwrap") and not subprocess.run([*confined, "true"], capture_output=True, timeout=120).returncode:
        return [*confined, "sh", str(script)]
    mounted = 'mount -t tmpfs -o size="$0" tmpfs "$1" && sh "$2"; code=$?; umount "$1"; exit $code'
    return ["sh", "-c", mounted, str(DISK_BYTES), str(folder), str(script)]


def test_run_on_a_disk_that_fills_up_is_resumed_once_there_is_room(place: Path, whole: Path) -> None:
    (place / "disk").mkdir()
    write_config(**JOB)
    (place / "fill.sh").write_text(ON_SMALL_DISK)
    command = on_small_disk(place / "disk", place / "fill.sh")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=place, env=environment, timeout=2 * TIMEOUT_S, **outputs)
    assert done.returncode == 0, done.stdout
    assert "ended with 2" in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert done.stdout.count("remedy: make room on ") == 1, done.stdout
    assert "mtrl-train --resume --out disk/r" in " ".join(done.stdout.split())
    assert read_run_metrics("kept") == read_run_metrics(whole)


def test_clock_that_jumps_by_hours_changes_no_metric(place: Path, whole: Path) -> None:
    jumps = Path(__file__).parents[2] / "hostile" / "clock_jumps.py"
    write_config(**JOB)
    words = (str(jumps), "-m", "trainer.cli", "--config", "run.yaml", "--out", "r")
    with run_process(place, *words, forked=False) as process:  # the clock jumps before anything is imported
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert read_run_metrics("r") == read_run_metrics(whole)


def test_newest_run_is_the_one_started_last_whatever_the_clock_says(place: Path) -> None:
    for number, (name, start) in enumerate((("a", 2), ("b", 3), ("c", 1))):
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"start": start}))
        os.utime(folder / "run.json", (number * 1e6, number * 1e6))
    assert newest_run() == Path("runs/b")


def test_torn_files_of_a_run_are_told_once_and_counted_once(
    run: Run, whole: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(whole.parent, place, dirs_exist_ok=True)
    folder = Path("r").absolute()
    metrics, rollouts = folder / METRICS_FILE, folder / ROLLOUTS_FILE
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0][: len(lines[0]) // 2] + b"\n" + b"".join(lines))  # Step 1 is there, and half of it.
    stored = rollouts.read_bytes().splitlines(keepends=True)
    torn = stored[1][:-40] + b"\0" * 39 + b"\n"
    rollouts.write_bytes(b"".join([stored[0], torn, *stored[2:]]))
    assert f"{len(stored) - 1} rollouts" in run("show", folder)
    run("plot", folder)
    run("--resume", "--out", folder, "--steps", 3)
    assert [line["step"] for line in read_run_metrics(folder)] == [1, 2, 3]
    assert read_run_metrics(folder)[:2] == read_run_metrics(whole)
    damaged = [text for text in caplog.messages if "is damaged" in text or "left out" in text]
    assert len(damaged) == 2, damaged
