"""Processes that are forked behave as those that are started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_python import ForkedPopen

PROGRAM = """
import atexit, os, sys

def main():
    atexit.register(print, "ended in order")
    print(os.getcwd(), sys.argv[1:], os.environ["GREETING"], __name__, "torch" in sys.modules, flush=True)
    sys.exit(sys.stdin.read())

main()
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture(params=[subprocess.Popen, ForkedPopen], ids=["started", "forked"])
def popen(request: pytest.FixtureRequest) -> Iterator[type[subprocess.Popen[str]]]:
    yield request.param


def test_program_has_its_arguments_folder_environment_and_streams(
    popen: type[subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"GREETING": "good day"}
    process = popen([sys.executable, "program.py", "a", "b c"], cwd=tmp_path, env=environment, **PIPES)  # type: ignore[call-overload]
    output, errors = process.communicate("what was wrong", timeout=60)
    assert output.splitlines() == [
        f"{tmp_path} ['a', 'b c'] good day __main__ {popen is ForkedPopen}", "ended in order"
    ]  # fmt: skip
    assert errors == "what was wrong\n" and process.returncode == 1


def test_program_that_runs_can_be_waited_for_and_ended(popen: type[subprocess.Popen[str]], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    process = popen([sys.executable, "program.py"], cwd=tmp_path, **PIPES)  # type: ignore[call-overload]
    with process:
        assert process.stdout.readline() == "here\n" and process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
        process.kill()  # nobody is there to be killed


def test_module_runs_by_its_name(popen: type[subprocess.Popen[str]], tmp_path: Path) -> None:
    process = popen([sys.executable, "-m", "trainer.cli", "--help"], cwd=tmp_path, **PIPES)  # type: ignore[call-overload]
    output, errors = process.communicate(timeout=60)
    assert "mtrl-train" in output and errors == "" and process.returncode == 0
