"""Tests of `mtrl-gateway list` on a terminal and in pipes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
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


def test_list_on_a_terminal_is_a_table_unless_plain_is_asked_for(place: Path) -> None:
    for options, is_table in ((["list"], True), (["list", "--plain"], False)):
        output = run_on_terminal(place, *options)
        assert ("what it does" in output) is is_table and ("\t" not in output) is is_table
        assert is_table or "\x1b" not in output


def run_on_terminal(place: Path, *words: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-m", "gateway.cli", *words]
    with subprocess.Popen(command, cwd=place, env=environment, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        output = b""
        with suppress(OSError):  # The end of a terminal.
            while chunk := os.read(ours, 65536):
                output += chunk
        os.close(ours)
        assert process.wait(TIMEOUT_S) == 0
    return output.decode()


def test_list_ends_quietly_when_its_reader_has_enough(place: Path) -> None:
    source = "".join(f"def tool_{number}() -> str:\n    return ''\n\n" for number in range(3000))
    (place / "tool_configs/words_mod.py").write_text(source)
    tools = "".join(f"  - function: words_mod:tool_{number}\n" for number in range(3000))
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
