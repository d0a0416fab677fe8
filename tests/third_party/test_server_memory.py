"""The reference memory server, which writes beside its own code unless it is told another file.

`make peers` installs it from npm.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio

from gateway.build import build_plan
from gateway.check import run_checks
from gateway.finding import Finding
from gateway.gateway import Gateway
from gateway.session import GatewaySession
from gateway.types import Outcome, Task, ToolCall
from tests.third_party.peers import write_servers

SERVER = Path(__file__).parents[2] / ".npm-peers/node_modules/@modelcontextprotocol/server-memory/dist/index.js"
OWN_FILE = {"MEMORY_FILE_PATH": "${MTRL_ROLLOUT_DIR}/memory.jsonl"}


def memory_server(folder: Path, **settings: Any) -> Path:
    node = shutil.which("node")
    assert node is not None and SERVER.exists(), "run `make peers`, which needs Node.js and npm"
    return write_servers(folder, memory={"command": node, "args": [str(SERVER)], "isolation": "process", **settings})


async def call(session: GatewaySession, tool: str, **arguments: Any) -> str:
    result = await session.call(ToolCall("1", tool, json.dumps(arguments)))
    assert result.outcome is Outcome.OK, result
    return result.text


async def find_problems(file: Path) -> list[Finding]:
    with anyio.fail_after(100):
        return [finding for finding in await run_checks(build_plan(None, file)) if finding.grade == "wrong"]


async def test_check_finds_that_processes_share_a_file_and_names_the_remedy(tmp_path: Path) -> None:
    [problem] = await find_problems(memory_server(tmp_path))
    assert "shares files: one session wrote with create_entities" in problem.text
    assert "MEMORY_FILE_PATH" in problem.remedy and "${MTRL_ROLLOUT_DIR}" in problem.remedy


async def test_remedy_of_the_check_isolates_rollouts(tmp_path: Path) -> None:
    file = memory_server(tmp_path, env=OWN_FILE)
    assert await find_problems(file) == []
    entity = {"name": "Ada", "entityType": "person", "observations": ["likes numbers"]}
    with anyio.fail_after(100):
        async with Gateway.load(None, file) as gateway, gateway.open(Task("a")) as one, gateway.open(Task("b")) as two:
            await call(one, "create_entities", entities=[entity])
            assert "Ada" in await call(one, "read_graph")
            assert "Ada" not in await call(two, "read_graph")
