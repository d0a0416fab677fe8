"""The wheel: complete, and usable outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import pytest

from gateway.version import DISTRIBUTION

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from what git tracks, so that nothing which lies in a working copy helps."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = ["pyproject.toml", "README.md", "LICENSE", *_tracked("gateway", "mtrl_plugins", "trainer")]
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, timeout=300, cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel alone."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    return folder


def _tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def _run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_wheel_has_every_file_of_both_packages(wheel: Path) -> None:
    assert {*_tracked("gateway", "mtrl_plugins", "trainer")} - {*ZipFile(wheel).namelist()} == set()


def test_wheel_has_both_commands_and_the_one_that_pipx_runs(wheel: Path) -> None:
    assert wheel.name.startswith(DISTRIBUTION.replace("-", "_"))
    archive = ZipFile(wheel)
    entries = ConfigParser()
    entries.read_string(archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode())
    assert {*entries["console_scripts"]} == {"mtrl-gateway", "mtrl-train"}
    assert entries["pipx.run"][DISTRIBUTION] == entries["console_scripts"]["mtrl-gateway"]


def test_installed_commands_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = _run(installed, tmp_path, "-c", "import gateway, trainer; print(gateway.__file__, trainer.__file__)")
    assert where.stdout.count(str(installed)) == 2, where.stderr
    ended = _run(installed, tmp_path, "-m", "trainer.cli", "--config", "sight", "--dry-run")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "tool_configs: there is no such folder" in ended.stderr
    ended = _run(installed, tmp_path, "-m", "trainer.cli", "init", "my_job")
    assert ended.returncode == 0, ended.stderr
    sources = ["--tools", "my_job/tools", "--mcp", "my_job/mcp_servers.json"]
    called = _run(installed, tmp_path, "-m", "gateway.cli", "call", *sources, "calculate", '{"expression": "30 + 12"}')
    assert called.stdout.strip() == "42", called.stderr


def test_installed_demo_has_its_tools_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    program = """
import anyio
from trainer.setup import make_gateway
from trainer.cli.train_command import _load_run_settings
settings, name = _load_run_settings({"model": None, "data": None, "environment": None}, None, [], resume=False)
async def main():
    async with make_gateway(settings) as gateway:
        print(settings.tools, sorted(spec.name for spec in gateway.specs))
anyio.run(main)
"""
    listed = _run(installed, tmp_path, "-c", program)
    assert listed.stdout.strip() == "demo ['calculate', 'feedback_judge', 'look_up']", listed.stderr
