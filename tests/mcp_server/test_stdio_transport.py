"""The MCP server over stdio: one session per client, a clean stdout, and a process that always ends."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.mcp_server.clients import CLIENT_MODES, TIMEOUT_S, text_of
from tests.servers.forked_server import forked_command

ROOT = Path(__file__).parents[2]
SERVE_COMMAND = ["-m", "gateway.cli", "stdio"]
TOOLS_YAML = """
tools:
  - function: tests.mcp_server.printing_tool:print_everywhere
  - function: tests.toolset_conformance.sample_tools:remember
"""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/tools.yaml").write_text(TOOLS_YAML)
    (tmp_path / "none.json").write_text('{"mcpServers": {}}')
    return ["--tools", str(tmp_path / "tools"), "--mcp", str(tmp_path / "none.json")]


@pytest.mark.parametrize("protocol", CLIENT_MODES)
async def test_client_has_one_session_and_tool_output_stays_off_stdout(protocol: str, options: list[str]) -> None:
    command, args = forked_command(*SERVE_COMMAND, *options)
    server = StdioServerParameters(command=command, args=args, cwd=ROOT)
    with anyio.fail_after(TIMEOUT_S):
        async with Client(server, mode=CLIENT_MODES[protocol]) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["print_everywhere", "remember"]
            assert text_of(await client.call_tool("print_everywhere", {})) == "read ''"
            await client.call_tool("remember", {"word": "a"})
            assert text_of(await client.call_tool("remember", {"word": "b"})) == '["a", "b"]'


@contextmanager
def start_server(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe, client_info = subprocess.PIPE, {"name": "t", "version": "1"}
    command, args = forked_command(*SERVE_COMMAND, *arguments)
    with subprocess.Popen([command, *args], bufsize=0, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            send_request(
                process, "initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client_info}
            )
            yield process
        finally:
            process.kill()


def send_request(process: subprocess.Popen[bytes], method: str, params: object) -> dict[str, object]:
    assert process.stdin is not None and process.stdout is not None
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    answer: dict[str, object] = json.loads(process.stdout.readline())
    return answer


def test_garbage_on_stdin_is_ignored_and_its_end_ends_the_server(options: list[str]) -> None:
    with start_server(*options) as process:
        assert process.stdin is not None
        process.stdin.write(b"\xff\xfe not json\n\n{}\n")
        assert "tools" in str(send_request(process, "tools/list", {}))
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_while_the_client_is_silent(options: list[str], signal_number: int) -> None:
    with start_server(*options) as process:
        process.send_signal(signal_number)
        assert process.wait(TIMEOUT_S) == 0


def test_signal_ends_the_server_while_the_client_does_not_read(options: list[str]) -> None:
    with start_server(*options) as process:
        assert process.stdin is not None
        flood = json.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}).encode() + b"\n"
        process.stdin.write(flood * 200)
        process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
