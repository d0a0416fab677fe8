"""Every block of the README does what it says, and it stays a page that can be read in two minutes."""

from __future__ import annotations

import subprocess

import pytest

from tests.docs.blocks import ROOT
from tests.docs.conftest import Follow
from tests.docs.servers import TIMEOUT_S, installed

README = ROOT / "README.md"


def test_every_block_of_the_readme_does_what_it_says(follow: Follow) -> None:
    done = follow("README.md")
    assert "policy" in done["mtrl-train show"] and "; 0 differ" in done["mtrl-train replay"]
    assert "trained" in done["mtrl-train why"] and "no problems found" in done["--dry-run"]


def test_the_readme_is_short_and_leads_to_every_guide() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 220
    for page in ("quickstart", "concepts", "tools", "interactions", "gateway", "your-own-job", "agents", "results"):
        assert f"(docs/{page}.md)" in text
    for framework in ("verl", "swift", "trl"):
        assert f"(docs/migration-{framework}.md)" in text


@pytest.mark.parametrize("program", ["mtrl-train", "mtrl-gateway"])
def test_the_commands_are_installed(program: str) -> None:
    """Pages run commands in the test's process; these are the scripts that a reader starts."""
    done = subprocess.run(
        [program, "--help"], env=installed(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0 and program in done.stdout, done.stderr
