"""The shipped tools without servers: each of the three takes a second to start, for every run that a test makes."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

from tests.shared_folders import build_once

ROOT = Path(__file__).parents[2]
MODULE = "shared_calculator"
"""A name that no file of a test has: what a fixture of a whole module has imported is not forgotten before."""


@cache
def native_tools() -> str:
    """A folder with the shipped functions, classes and interactions, and with the calculator as a function."""
    return str(build_once("native-tools", _copy) / "tool_configs")


def _copy(folder: Path) -> None:
    ignored = shutil.ignore_patterns("servers*", "sight.yaml", "__pycache__")
    tools = shutil.copytree(ROOT / "tool_configs", folder / "tool_configs", ignore=ignored)
    shutil.copy(ROOT / "tool_configs/servers/calculator.py", tools / f"{MODULE}.py")
    (tools / "servers.yaml").write_text(f"tools: [{{function: '{MODULE}:calculate'}}]\n")
