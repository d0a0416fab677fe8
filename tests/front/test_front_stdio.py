"""A desktop client starts the gateway, speaks to it over a pipe, and is never left with a process that does not end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.front.kit import ERAS, WITHIN_S, words

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-m", "gateway.cli", "stdio"]
YAML = """
tools:
  - function: tests.front.printer:chatter
  - function: tests.test_gateway:remember
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/tools.yaml").write_text(YAML)
    (tmp_path / "none.json").write_text('{"mcpServers": {}}')
    return ["--tools", str(tmp_path / "tools"), "--mcp", str(tmp_path / "none.json")]


@pytest.mark.parametrize("era", ERAS)
async def test_one_client_has_one_session_and_noise_stays_off_the_wire(era: str, files: list[str]) -> None:
    server = StdioServerParameters(command=SERVE[0], args=[*SERVE[1:], *files], cwd=ROOT)
    with anyio.fail_after(WITHIN_S):
        async with Client(server, mode=ERAS[era]) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["chatter", "remember"]
            assert words(await client.call_tool("chatter", {})) == "read ''"
            await client.call_tool("remember", {"word": "a"})
            assert words(await client.call_tool("remember", {"word": "b"})) == '["a", "b"]'


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe, hello = subprocess.PIPE, {"name": "t", "version": "1"}
    command = [*SERVE, *arguments]
    with subprocess.Popen(command, bufsize=0, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            ask(process, "initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": hello})
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[bytes], method: str, params: object) -> dict[str, object]:
    assert process.stdin is not None and process.stdout is not None
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    answer: dict[str, object] = json.loads(process.stdout.readline())
    return answer


def test_it_ends_when_its_client_closes_the_pipe(files: list[str]) -> None:
    with started(*files) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WITHIN_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_it_is_asked_to_though_its_client_keeps_silent(files: list[str], number: int) -> None:
    with started(*files) as process:
        process.send_signal(number)
        assert process.wait(WITHIN_S) == 0


def test_it_ends_though_its_client_no_longer_reads(files: list[str]) -> None:
    with started(*files) as process:
        assert process.stdin is not None
        flood = json.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}).encode() + b"\n"
        process.stdin.write(flood * 200)
        process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 0


def test_garbage_on_the_wire_costs_nothing_else(files: list[str]) -> None:
    with started(*files) as process:
        assert process.stdin is not None
        process.stdin.write(b"\xff\xfe not json\n\n{}\n")
        assert "tools" in str(ask(process, "tools/list", {}))
