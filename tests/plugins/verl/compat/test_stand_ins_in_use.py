"""Tests of verl's classes as a configuration uses them: results of a real server, and what `check` says of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

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


PEERS = Path(__file__).parents[4] / ".peers"
ASYNC = """
import asyncio, inspect, pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "asyncio: a coroutine")

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True
"""


def test_verls_tests_of_its_interaction_pass_with_the_command_run(tmp_path: Path) -> None:
    shutil.copy(PEERS / "tests" / "interactions" / "test_gsm8k_interaction.py", tmp_path)
    (tmp_path / "conftest.py").write_text(ASYNC)
    words = ["run", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found := re.search(r"(\d+) passed", done.stdout)) and int(found[1]) >= 13, done.stdout


def test_a_program_gets_its_arguments_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    code = "import sys, helper\nfrom verl.interactions.base import BaseInteraction\n"
    (tmp_path / "program.py").write_text(code + "print(sys.argv[1:], BaseInteraction.__name__)\n")
    (tmp_path / "helper.py").write_text("from verl.tools.base_tool import BaseTool\n")
    words = [sys.executable, "-m", "trainer.cli", "run"]
    done = subprocess.run(
        [*words, "program.py", "--steps", "3"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "['--steps', '3'] BaseInteraction\n", done.stderr
    done = subprocess.run([*words, "none.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "none.py: there is no such file" in done.stderr
