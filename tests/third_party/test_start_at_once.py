"""Clients with short timeouts reach a gateway that has a stuck server; Ctrl-C ends it while servers start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.start_server import stdio_command
from tests.third_party.peers import PYTHON, write_servers

STUCK = {"command": sys.executable, "args": ["-c", "import sys; sys.stdin.read()"], "connect_timeout_s": 600}
"""A server that never answers, and may take longer to connect than any timeout of these tests."""
TIMEOUT_S = 120.0
ROOT = str(Path(__file__).parents[2])

TOOLS = "tools:\n  - function: words:shout\n"
WORDS = 'def shout(text: str) -> str:\n    """Says it louder."""\n    return text.upper()\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tool_configs").mkdir()
    (tmp_path / "tool_configs" / "tools.yaml").write_text(TOOLS)
    (tmp_path / "tool_configs" / "words.py").write_text(WORDS)
    command, args = stdio_command()
    write_servers(tmp_path, stuck=STUCK, good={"command": command, "args": args})
    return tmp_path


def test_openai_agents_reaches_a_stdio_gateway_with_a_stuck_server(place: Path) -> None:
    gateway = [sys.executable, "-m", "gateway.cli", "stdio", "--wait", "0.1"]
    command = ["env", f"PYTHONPATH={ROOT}", *gateway]
    client = Path(__file__).with_name("agents_client.py")
    environment = {**os.environ, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    done = subprocess.run(
        [PYTHON, str(client), *command],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "shout" in seen["first"] and {"shout", "echo", "pid"} <= set(seen["later"])
    assert int(seen["pid"]) > 0
