"""Tests of verl's classes as a configuration uses them: results of a real server, and what `check` says of them."""

from __future__ import annotations

import json
import subprocess
import sys

import anyio
import pytest

from gateway.build import build_plan
from gateway.check import run_checks
from tests.conftest import Write

SERVER = """
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("search")

@server.tool()
def search(query: str) -> str:
    if query == "nothing":
        raise ToolError("no index is loaded")
    return '{"query": "gnu", "results": [{"title": "A"}, {"title": "B"}], "took": 3}'

server.run("stdio")
"""
TOOLS = """
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, rate_limit: 120, timeout: 20}
    mcp: {mcp_servers_config_path: ./servers.json}
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
interaction: {class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}
"""


def _write_files(write: Write) -> None:
    write("search_server.py", SERVER)
    server = {"command": sys.executable, "args": ["search_server.py"], "cwd": ".", "autoApprove": ["search"]}
    write("servers.json", json.dumps({"mcpServers": {"search": server}}))
    write("tools.yaml", TOOLS)


async def test_check_tells_stand_ins_and_keys_of_other_clients(write: Write) -> None:
    _write_files(write)
    with anyio.fail_after(60):
        findings = await run_checks(build_plan("tools.yaml", None))
    messages = [finding.text for finding in findings if finding.grade == "ok"]
    for name in ("mcp_search_tool.MCPSearchTool", "gsm8k_tool.Gsm8kTool"):
        assert (
            f"verl.tools.{name}: mtrl's own class in its place, with the same results (verl is not installed)"
            in messages
        )
    assert any(message.startswith("verl.interactions.gsm8k_interaction.Gsm8kInteraction: ") for message in messages)
    (note,) = [finding.text for finding in findings if finding.grade == "note"]
    assert note == (
        "servers.json:1: mcpServers.search.autoApprove: `autoApprove` is ignored: nothing asks for confirmation here"
    )


PROGRAM = """
import sys, threading
from gateway.errors import ConfigError
from verl.tools.schemas import ToolResponse

def work():
    threading.main_thread().join(2)
    print("written")

threading.Thread(target=work).start()
if sys.argv[1] == "raise":
    raise ConfigError("theirs", field="x")
sys.exit(3)
"""


@pytest.mark.parametrize(("way", "code"), [("exit", 3), ("raise", 1)])
def test_a_program_keeps_its_threads_its_code_and_its_tracebacks(way: str, code: int, write: Write) -> None:
    words = [sys.executable, "-m", "trainer.cli", "run", str(write("program.py", PROGRAM)), way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "written\n"), done.stderr
    assert ("Traceback" in done.stderr) is (way == "raise")
