"""`mtrl-gateway login`, `call` and `logout` as a person runs them, with the browser that `$BROWSER` names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import STDOUT

import anyio

from tests.mcp_client.auth.protected_user import login_files, user_of_protected_server
from tests.servers.forked_server import forked_command

BROWSER = """
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=60).read()
"""


async def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it prints."""
    browser = folder / "browser.py"
    browser.write_text(BROWSER)
    env = os.environ | {"BROWSER": f"{sys.executable} {browser} %s"}
    command, words = forked_command("-m", "gateway.cli", *arguments, "--mcp", str(folder / "mcp_servers.json"))
    done = await anyio.run_process([command, *words], check=False, stderr=STDOUT, env=env, cwd=folder)
    return done.returncode, done.stdout.decode()


async def test_person_logs_in_calls_a_tool_and_logs_out(tmp_path: Path) -> None:
    async with user_of_protected_server(tmp_path):
        status, printed = await run(tmp_path, "check")
        assert status == 1 and "mtrl-gateway login vault" in printed
        status, printed = await run(tmp_path, "login", "vault")
        assert status == 0 and "vault offers 2 tools" in printed, printed
        assert len(login_files()) == 1 and str(login_files()[0]) in printed.replace("\n", "")
        status, printed = await run(tmp_path, "call", "read")
        assert status == 0 and "read done" in printed, printed
        status, printed = await run(tmp_path, "logout", "vault")
        assert status == 0 and "logged out of vault" in printed and login_files() == []
