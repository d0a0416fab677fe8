"""Every block of docs/migration-verifiers.md does what it says, with a stand-in for the virtual environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mtrl_plugins.environments.host_process import stop_hosts
from tests.docs.conftest import Follow
from tests.plugins.verifiers.verifiers_runs import STAND_IN


@pytest.fixture
def virtual_environment(follow: Follow) -> None:
    """A Python that has the stand-in of verifiers, where the page installs the real one."""
    python = Path("my_verifiers/bin/python")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_IN} exec {sys.executable} "$@"\n')
    python.chmod(0o755)


@pytest.mark.usefixtures("virtual_environment")
def test_migration_verifiers_page(follow: Follow) -> None:
    done = follow("docs/migration-verifiers.md", no_servers=True)
    stop_hosts()
    steps = [json.loads(line) for line in Path("runs/moved/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all("reward/environment" in step and not step["reward/failed"] for step in steps)
    assert "price" in done["mtrl-train show"]
