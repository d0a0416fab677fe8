"""The Makefile: on a new machine, no two targets make the same environment at once."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_ci_makes_each_environment_once_though_its_targets_run_side_by_side(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", ".ci"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    targets = re.search(r"^part make (.*\binstalls\b[^#\n]*)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert targets is not None
    words = ["make", "--dry-run", *targets[1].split()]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    made = Counter(re.findall(r"-m venv (\S+)|npm install .*?--prefix (\S+)|pip install .*?--target (\S+)", run.stdout))
    assert len(made) > 5
    assert max(made.values()) == 1, made


def test_what_targets_install_is_ignored_by_git_and_removed_by_clean() -> None:
    makefile = (ROOT / "Makefile").read_text()
    made = set(re.findall(r"^(\.[\w-]+)/installed:", makefile, re.MULTILINE))
    made |= set(re.findall(r"-m venv (\.[\w-]+)", makefile))
    assert len(made) > 5
    removed = re.search(r"^clean:.*\n\trm -rf (.*)$", makefile, re.MULTILINE)
    assert removed is not None and made <= set(removed[1].split())
    ignored = set((ROOT / ".gitignore").read_text().split())
    assert made <= ignored, "without a slash at its end, which links to a folder do not match"


def test_no_link_is_in_the_repository() -> None:
    """A link to a folder of one machine would replace what is installed there on another."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    words = ["git", "ls-files", "--stage"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert len(listed.splitlines()) > 1000
    assert [line for line in listed.splitlines() if line.startswith("120000")] == []
