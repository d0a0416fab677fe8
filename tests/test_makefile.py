"""The Makefile: on a new machine, no two targets make the same environment at once."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

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
