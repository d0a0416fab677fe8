"""The training of `--ranks N` is started again after a rank is lost, from the latest checkpoint."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from trainer.distributed import restart_ranks
from trainer.distributed.restart_ranks import RestartedTraining, run_restarted
from trainer.distributed.settings import DistributedSettings

CHILD = """
import json, os, sys, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--out") + 1])
run.mkdir(exist_ok=True)
with (run / "starts").open("a") as starts:
    starts.write(json.dumps(sys.argv[1:]) + "\\n")
with (run / "restarts").open("a") as restarts:
    restarts.write(os.environ["MTRL_RESTARTS"])
number = len((run / "starts").read_text().splitlines()) - 1
does = json.loads(os.environ["DOES"])[number]
(run / "run.json").write_text("{}")
if does == "saves":
    (run / f"checkpoints/{number + 1:06}").mkdir(parents=True)
    sys.exit(1)
if does == "killed":
    os.kill(os.getpid(), 9)
if does == "waits":
    (run / "waits").touch()
    time.sleep(300)
sys.exit(does)
"""

COMMAND = """
import sys
from pathlib import Path
from trainer.distributed.restart_ranks import RestartedTraining, run_restarted
from trainer.distributed.settings import DistributedSettings
training = RestartedTraining(Path("run"), (), program=(sys.executable, "child.py"))
sys.exit(run_restarted(training, DistributedSettings(ranks=2), print))
"""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RestartedTraining:
    monkeypatch.setattr(restart_ranks, "FIRST_DELAY_S", 0.0)
    words = ("--config", "it's.yaml")
    return RestartedTraining(tmp_path / "run", words, ("--view",), program=(sys.executable, "-c", CHILD))


def run(training: RestartedTraining, monkeypatch: pytest.MonkeyPatch, *does: int | str, **settings: int) -> list[str]:
    """Has the training end in these ways; returns what is logged, and at last the exit code."""
    monkeypatch.setenv("DOES", json.dumps(does))
    lines: list[str] = []
    code = run_restarted(training, DistributedSettings(ranks=4, **settings), lines.append)
    return [*lines, str(code)]


def starts(training: RestartedTraining) -> list[list[str]]:
    return [json.loads(line) for line in (training.folder / "starts").read_text().splitlines()]


def test_lost_training_resumes_and_a_killed_one_too(
    training: RestartedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, code = run(training, monkeypatch, 1, "killed", 0)
    assert code == "0" and "ended with exit code 1; it starts again from step 0 with 4 ranks (2 restarts" in first
    assert "was killed by signal 9" in second
    folder = str(training.folder)
    resumed = ["--resume", "--out", folder, "--ranks", "4", "--view"]
    assert starts(training) == [["--out", folder, "--config", "it's.yaml"], resumed, resumed]
    assert (training.folder / "restarts").read_text() == "012", "each is told how many restarts there were"


def test_wrong_settings_and_an_ended_training_are_not_started_again(
    training: RestartedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(training, monkeypatch, 2) == ["2"]
    assert run(training, monkeypatch, 0, 130) == ["130"]


def test_signal_to_the_command_ends_the_training_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOES", '["waits"]')
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "child.py").write_text(CHILD)
    with run_process(tmp_path, "command.py") as process:
        wait_until((tmp_path / "run/waits").exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert len((tmp_path / "run/starts").read_text().splitlines()) == 1
