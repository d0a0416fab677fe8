"""Fixtures that run documentation pages: `follow` runs every block of a page and returns what was printed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compat_imports import fresh_compat_imports
from tests.docs.blocks import ROOT
from tests.docs.runner import Followed, PageRunner
from tests.docs.servers import Server
from tests.shared_folders import build_once
from tests.trainer.model_folders import save_tiny_model
from tests.trainer.train import jobs
from trainer.train.settings import TrainSettings

__all__ = ["fresh_compat_imports"]

Follow = Callable[..., Followed]


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user's clone is, with a small model; pages get copies of it."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "tool_configs", clone / "tool_configs", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("mcp_servers.json", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, clone)
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    save_tiny_model(clone / "models" / "Qwen2.5-0.5B-Instruct", kind="qwen2")
    return clone


@pytest.fixture(scope="session")
def small_job() -> TrainSettings:
    """The default job in small, which stands in for it."""
    return jobs.small_job(tools="tool_configs", evaluation={"every": 0, "final_rows": 4})


@pytest.fixture(scope="session")
def trained(clone: Path, small_job: TrainSettings) -> Path:
    """A finished training run of the small job, which pages know as `runs/default`."""

    def train(folder: Path) -> None:
        shutil.copytree(clone, folder, dirs_exist_ok=True)
        with PageRunner(folder, lambda: small_job) as runner:
            runner.run_command("mtrl-train --tools tool_configs/ --out runs/default")

    return build_once("docs-trained", train) / "runs" / "default"


@pytest.fixture(scope="session")
def shared_gateway(clone: Path) -> Iterator[Server]:
    """`mtrl-gateway serve` of the shipped configuration, for pages that only send requests to it."""
    with Server(["mtrl-gateway", "serve"], clone) as server:
        yield server


@pytest.fixture
def follow(
    request: pytest.FixtureRequest, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Follow]:
    """Follows a page: `follow("docs/quickstart.md")` in a copy of the clone, which is the working folder afterwards."""
    place = tmp_path / "clone"
    shutil.copytree(clone, place)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    runner = PageRunner(
        place,
        small_job=lambda: request.getfixturevalue("small_job"),
        gateway=lambda: request.getfixturevalue("shared_gateway").url,
    )

    def follow(page: str, *, no_servers: bool = False) -> Followed:
        if no_servers:  # The page has its own tools alone; starting the shipped servers would only take time.
            (place / "mcp_servers.json").write_text('{"mcpServers": {}}')
        if "runs/default" in (ROOT / page).read_text(encoding="utf-8"):
            shutil.copytree(request.getfixturevalue("trained"), place / "runs" / "default")
        return runner.follow(ROOT / page)

    with runner:
        yield follow
