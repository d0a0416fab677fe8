"""Tests of `mtrl-gateway list` on a terminal and in pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import TIMEOUT_S, TOOLS, WORDS_MODULE, make_place, run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


def plain_lines(output: str) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in output.splitlines()}


def test_list_in_a_pipe_has_one_tool_a_line_with_tabs_between_its_fields(place: Path) -> None:
    words = "def long(text: str, other: int = 3):\n    " + f'"""{"Says much. " * 40}\tafter a tab\n\nMore."""\n'
    (place / "tool_configs/words_mod.py").write_text(WORDS_MODULE + words)
    (place / "tool_configs/words.yaml").write_text(TOOLS + "  - function: words_mod:long\n")
    for options in (["list"], ["list", "--plain"]):
        listed = plain_lines(run(place, *options).stdout)
        assert {len(fields) for fields in listed.values()} == {4}
        assert listed["shout"] == ["policy", "{text: string}", "Says it louder.", "tool_configs/words.yaml tools[0]"]
        assert listed["long"][2].endswith("Says much. after a tab") and listed["echo"][3] == "mcp server 'odd'"


def test_list_ends_quietly_when_its_reader_has_enough(place: Path) -> None:
    source = "".join(f"def tool_{number}() -> str:\n    return ''\n\n" for number in range(1500))
    (place / "tool_configs/words_mod.py").write_text(source)
    tools = "".join(f"  - function: words_mod:tool_{number}\n" for number in range(1500))
    (place / "tool_configs/words.yaml").write_text("tools:\n" + tools)
    (place / "mcp_servers.json").unlink()
    command = f"{sys.executable} -m gateway.cli list | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("tool_0\tpolicy")
