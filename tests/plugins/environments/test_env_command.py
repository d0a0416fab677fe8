"""`mtrl-train env`: interpreters in the user's data folder are made, listed, found and deleted."""

from __future__ import annotations

import os
import platform
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.errors import ConfigError
from mtrl_plugins.environments import interpreters
from mtrl_plugins.environments.host_process import stop_hosts
from tests.plugins.environments.environment_runs import GYM_PYTHON
from tests.trainer.model_folders import save_tiny_model
from trainer.cli import app

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command with a data folder of its own, without a package index."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return lambda *words: CliRunner().invoke(app, [*words])


def make_wheel(folder: Path, name: str) -> Path:
    """A package with one empty module."""
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return wheel


def test_interpreter_is_installed_extended_listed_and_removed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = make_wheel(tmp_path, "tiny_one"), make_wheel(tmp_path, "tiny_two")
    monkeypatch.setattr(interpreters, "RELEASES", {"gymnasium": (str(first),), "textarena": ("textarena==0.7.4",)})
    installed = run("env", "install", "gymnasium")
    assert installed.exit_code == 0, installed.output
    assert "Successfully installed tiny-one-1.0" in installed.output.replace("_", "-")
    assert "environment: gymnasium:NAME" in installed.output and " MB in " in installed.output
    python = Path(run("env", "where", "gymnasium").output.strip())
    assert python.exists() and python.is_relative_to(tmp_path / "data/mtrl/environments")
    assert run("env", "install", "gymnasium", "--add", str(second)).exit_code == 0
    assert list(python.parents[1].glob("lib/*/site-packages/tiny_*.py")) != []
    listed = run("env", "list").output
    assert str(second) in listed.replace("\n", "") and "textarena  not installed" in listed
    failed = run("env", "install", "gymnasium", "--add", "no-such-package-xyz")
    assert failed.exit_code != 0 and python.exists()
    monkeypatch.setattr(interpreters, "RELEASES", {"gymnasium": ("tiny_one==2",)})
    assert "; tested is tiny_one==2: run `mtrl-train env install gymnasium`" in run("env", "list").output.replace(
        "\n", ""
    )
    assert re.fullmatch(r"gymnasium is removed \(\d+ MB\)\n", run("env", "remove", "gymnasium").output)
    assert run("env", "remove", "gymnasium").output == "gymnasium was not installed\n"
    assert "gymnasium is not installed" in run("env", "where", "gymnasium").output


def test_earlier_release_is_brought_to_the_tested_one_and_added_packages_stay(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    folder = tmp_path / "data/mtrl/environments/gymnasium"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").touch()
    (folder / "mtrl.json").write_text('{"packages": ["gymnasium==1.3.0", "gymnasium[toy-text]", "ale-py"]}')
    monkeypatch.setattr(interpreters, "_run", lambda command, *_: commands.append(command))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert run("env", "install", "gymnasium", "--add", "./mine").exit_code == 0
    assert commands[0][-4:] == ["gymnasium==1.4.0", "gymnasium[toy-text]", "ale-py", str(tmp_path / "mine")]
    assert "tested is" not in run("env", "list").output
    assert "--add pygame" in run("env", "install", "--help").output


def test_interpreter_is_made_anew_with_another_python_and_kept_if_that_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(interpreters, "RELEASES", {"textarena": ("textarena==0.7.4",)})
    folder = tmp_path / "data/mtrl/environments/textarena"
    commands: list[list[str]] = []

    def make(command: list[str], *_: object) -> None:
        commands.append(command)
        if "venv" in command:
            (folder / "bin").mkdir(parents=True)
            (folder / "bin/python").touch()
            version = "3.9.9" if command[0] == sys.executable else platform.python_version()
            (folder / "pyvenv.cfg").write_text(f"home = x\nversion = {version}\n")
        elif fails:
            raise ConfigError("pip ended")

    fails, other = False, tmp_path / "other-python"
    monkeypatch.setattr(interpreters, "_run", make)
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    assert run("env", "install", "textarena", "--add", "numpy").exit_code == 0
    assert "(Python 3.9.9, " in run("env", "list").output.replace("\n", " ")
    fails = True
    assert run("env", "install", "textarena", "--python", str(other)).exit_code == 2
    assert "numpy (Python 3.9.9, " in run("env", "list").output.replace("\n", " ")
    fails = False
    for _ in range(2):  # The second time, it has this Python already.
        assert run("env", "install", "textarena", "--python", str(other)).exit_code == 0
    assert f"numpy (Python {platform.python_version()}, " in run("env", "list").output.replace("\n", " ")
    assert [command[0] for command in commands if "venv" in command] == [sys.executable, str(other), str(other)]
    assert not folder.with_name("textarena.earlier").exists()
    refused = run("env", "install", "textarena", "--python", "/no/python3.99")
    assert refused.exit_code == 2 and "'/no/python3.99' is no Python to be used (there is none)" in refused.output


def test_installation_that_fails_leaves_nothing_behind_and_says_what_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(interpreters, "RELEASES", {"textarena": ("no-such-package-xyz==1",)})
    failed = run("env", "install", "textarena")
    assert failed.exit_code == 2 and "No matching distribution found" in failed.output
    assert not (tmp_path / "data/mtrl/environments/textarena").exists()
    assert "'gym' is no framework of environments" in run("env", "install", "gym").output


@pytest.mark.parametrize(
    "line",
    [
        "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
        "WARNING: Retrying ... NewConnectionError(...: [Errno 101] Network is unreachable)",
    ],
)
def test_missing_network_is_told_from_other_failures(line: str) -> None:
    tries = [f"WARNING: Retrying (Retry(total={left}))" for left in (2, 1, 0)]
    error = interpreters._failure(["python", "-m", "pip", "install"], "openenv", 1, [*tries, line])
    assert error.problem.count("WARNING: Retrying") == 1  # pip's last attempt is enough.
    assert "the package index cannot be reached" in (error.remedy or "")
    assert "openenv==0.10.0" in (error.remedy or "")


def test_dry_run_says_what_is_installed_and_what_the_environment_says(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--environment", "gymnasium:FrozenLake-v1", "--model", str(save_tiny_model(tmp_path / "m")), "--dry-run")
    missing = run(*words)
    assert missing.exit_code == 2 and "mtrl-train env install gymnasium" in missing.output
    monkeypatch.setattr("mtrl_plugins.environments.host_process.require_interpreter", lambda _: GYM_PYTHON)
    found = run(*words)
    stop_hosts()
    assert found.exit_code == 0, found.output
    assert "(gymnasium 1.4.0): actions by the tools step; seed 0 begins with" in found.output
    assert "[S]FFF" in found.output and "1,000 tasks of environment" in found.output
