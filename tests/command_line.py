"""Runs of the `mtrl-gateway` command line for tests, and a folder with tools for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.forked_python import ForkedPopen
from tests.servers.start_server import stdio_command

TIMEOUT_S = 120

TOOLS = """
tools:
  - function: words_mod:shout
    pure: true
  - function: words_mod:picture
  - function: words_mod:spell
"""
WORDS_MODULE = '''
from PIL import Image

def shout(text: str) -> str:
    """Says it louder."""
    return text.upper()

def picture() -> list:
    """Draws nothing."""
    return ["here", Image.new("RGB", (3, 2))]

def spell() -> str:
    """Answers with what a terminal would obey."""
    return "\\x1b[2Jgone"
'''


def make_place(folder: Path) -> Path:
    """A folder with three native tools and one server."""
    tools = folder / "tool_configs"
    tools.mkdir()
    (tools / "words.yaml").write_text(TOOLS)
    (tools / "words_mod.py").write_text(WORDS_MODULE)
    command, args = stdio_command()
    servers = {"mcpServers": {"odd": {"command": command, "args": list(args)}}}
    (folder / "mcp_servers.json").write_text(json.dumps(servers))
    return folder


def run(place: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command there, and checks its exit code."""
    command = [sys.executable, "-m", "gateway.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    pipe = subprocess.PIPE
    with ForkedPopen(command, cwd=place, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    assert done.returncode == code, done.stdout + done.stderr
    return done
