"""The command line as its users meet it: another process, real files, real ports, real signals."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from gateway.types import Outcome
from tests.servers.start import stdio_command

TIMEOUT_S = 40

TOOLS = """
tools:
  - function: words_mod:shout
    pure: true
  - function: words_mod:picture
  - function: words_mod:spell
"""
WORDS = '''
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


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tools = tmp_path / "tool_configs"
    tools.mkdir()
    (tools / "words.yaml").write_text(TOOLS)
    (tools / "words_mod.py").write_text(WORDS)
    command, args = stdio_command()
    servers = {"mcpServers": {"odd": {"command": command, "args": list(args)}}}
    (tmp_path / "mcp_servers.json").write_text(json.dumps(servers))
    return tmp_path


def run(place: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


class Serving:
    """A `serve` under way: what it prints is read by threads, so that every wait can have an end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: queue.Queue[str] = queue.Queue()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()
        self.url = self.until(r"(http://127\.0\.0\.1:\d+)")

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.lines.put(line)

    def until(self, pattern: str) -> str:
        seen = []
        while True:
            try:
                seen.append(self.lines.get(timeout=TIMEOUT_S))
            except queue.Empty:
                raise AssertionError(f"{pattern} never came; seen: {''.join(seen)}") from None
            if found := re.search(pattern, seen[-1]):
                return found[found.lastindex or 0]

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.ask("/v1/tools")["data"]]


@contextmanager
def serving(place: Path, *words: str) -> Iterator[Serving]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Serving(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def test_list_shows_every_tool_and_json_its_schema(place: Path) -> None:
    table = run(place, "list").stdout
    assert "shout" in table and "Says it louder." in table and "echo" in table and "mcp server 'odd'" in table
    listed = json.loads(run(place, "list", "--json").stdout)
    (shout,) = [tool for tool in listed["data"] if tool["function"]["name"] == "shout"]
    assert listed["object"] == "list" and shout["type"] == "function"
    assert shout["function"]["parameters"]["required"] == ["text"]


def test_call_prints_text_and_saves_pictures_without_writing_over_any(place: Path) -> None:
    assert run(place, "call", "shout", '{"text": "hey"}').stdout == "HEY\n"
    for number in (1, 2):
        printed = run(place, "call", "picture", "--save", "out").stdout
        assert f"out/picture-{number}.png (3x2, image/png)" in printed
        assert (place / "out" / f"picture-{number}.png").is_file()


def test_what_a_tool_prints_cannot_command_the_terminal(place: Path) -> None:
    printed = run(place, "call", "spell").stdout
    assert "\x1b" not in printed and "gone" in printed


def test_a_call_that_does_not_end_well_exits_with_one_and_says_why(place: Path) -> None:
    wrong = run(place, "call", "shout", '{"text": 3}', code=1)
    assert '3 is not of type "string"' in wrong.stdout and "invalid" in wrong.stderr
    failed = run(place, "call", "fail", code=1)
    assert Outcome.ERROR.value in failed.stderr


def test_check_says_of_each_server_whether_it_is_well(place: Path) -> None:
    assert "everything is in order" in run(place, "check").stdout


def test_check_names_the_server_the_reason_and_the_remedy(place: Path) -> None:
    servers = {
        "mcpServers": {
            "gone": {"command": "no-such-program-anywhere"},
            "far": {"url": "http://127.0.0.1:9/mcp", "optional": True, "start": "python far.py"},
        }
    }
    (place / "mcp_servers.json").write_text(json.dumps(servers))
    printed = run(place, "check", code=1).stdout
    assert re.search(r"FAIL server gone is down: .*no-such-program-anywhere", printed)
    assert re.search(r"note server far is down: ", printed) and "remedy: start it: python far.py" in printed
    assert "1 to mend" in printed


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tool_configs/words.yaml", "tools: [", "words.yaml"),
        ("tool_configs/words.yaml", "tools:\n  - function: words_mod:shout\n    timeout: 3\n", "timeout_s"),
        ("mcp_servers.json", "{", "mcp_servers.json"),
        (
            "mcp_servers.json",
            '{"mcpServers": {"a": {"command": "x", "env": {"K": "${NO_SUCH_VARIABLE}"}}}}',
            "NO_SUCH_VARIABLE",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_message_and_no_traceback(place: Path, file: str, text: str, words: str) -> None:
    (place / file).write_text(text)
    for command in (["list"], ["check"], ["call", "shout"], ["serve"], ["stdio"]):
        told = run(place, *command, code=2).stderr
        assert words in told and "Traceback" not in told


def test_without_any_files_it_says_where_they_should_be(tmp_path: Path) -> None:
    assert "remedy: run this where they are" in run(tmp_path, "list", code=2).stderr


def test_a_port_in_use_is_one_message_with_a_remedy(place: Path) -> None:
    with serving(place) as server:
        port = server.url.rpartition(":")[2]
        told = run(place, "serve", "--port", port, code=2).stderr
    assert f"127.0.0.1:{port} is in use" in told and "--port" in told


def test_a_port_that_is_none_is_one_message(place: Path) -> None:
    told = run(place, "serve", "--port", "99999", code=2).stderr
    assert "--port" in told and "Traceback" not in told


def test_list_says_beside_the_list_which_server_is_down(place: Path) -> None:
    servers = {"mcpServers": {"gone": {"command": "no-such-program"}}}
    (place / "mcp_servers.json").write_text(json.dumps(servers))
    for words in (["list"], ["list", "--json"]):
        listed = run(place, *words)
        assert "server gone: it is down: cannot start 'no-such-program'" in listed.stderr
        assert "shout" in listed.stdout and "gone" not in listed.stdout


def test_another_host_needs_a_token(place: Path) -> None:
    told = run(place, "serve", "--host", "0.0.0.0", "--port", "0", code=2).stderr
    assert "--token-file" in told


def test_a_changed_configuration_is_taken_over_and_a_wrong_one_refused(place: Path) -> None:
    yaml = place / "tool_configs" / "words.yaml"
    with serving(place) as server:
        session = server.ask("/v1/sessions", {"tools": ["shout"]})["id"]
        yaml.write_text(TOOLS.replace("words_mod:spell", "words_mod:shout\n    name: scream"))
        server.until("the configuration has changed")
        assert "scream" in server.names() and "spell" not in server.names()
        yaml.write_text("tools: [")
        server.process.send_signal(signal.SIGHUP)
        server.until("the new configuration is refused, and the old one stays")
        assert "scream" in server.names()
        calls = [{"id": "1", "type": "function", "function": {"name": "shout", "arguments": '{"text": "a"}'}}]
        answer = server.ask(f"/v1/sessions/{session}/calls", {"tool_calls": calls})
        assert answer["messages"][0]["content"] == "A"


def test_a_recorded_session_is_replayed_equal_without_the_tools(place: Path) -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("count", "{}"), ("pid", "{}"), ("picture", "{}"))
    ]

    def talk(server: Serving) -> Any:
        opened = server.ask("/v1/sessions", {"task_id": "t"})
        return server.ask(f"/v1/sessions/{opened['id']}/calls", {"tool_calls": calls})

    with serving(place, "--record", "tape") as server:
        before = talk(server)
    assert [result["outcome"] for result in before["results"]] == ["ok"] * 3
    for file in ("mcp_servers.json", "tool_configs/words_mod.py"):
        (place / file).unlink()
    with serving(place, "--replay", "tape") as server:
        server.process.send_signal(signal.SIGHUP)
        assert talk(server) == before
        opened = server.ask("/v1/sessions", {"task_id": "t"})
        refused = server.ask(f"/v1/sessions/{opened['id']}/calls", {"tool_calls": calls[:1]})
        assert refused["error"]["type"] == "not_recorded" and "count({})" in refused["error"]["message"]


def on_a_pipe(place: Path) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "gateway.cli", "stdio"],
        cwd=place,
        env={"PYTHONPATH": str(Path(__file__).parent.parent)},
    )


async def test_it_is_an_mcp_server_on_standard_input_and_output(place: Path) -> None:
    with anyio.fail_after(TIMEOUT_S):
        async with Client(on_a_pipe(place)) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            result = await client.call_tool("picture", {})
    assert {"shout", "picture", "echo"} <= set(names)
    assert [part.type for part in result.content] == ["text", "image"]


async def test_a_server_on_a_pipe_follows_its_files_too(place: Path) -> None:
    with anyio.fail_after(TIMEOUT_S):
        async with Client(on_a_pipe(place)) as client:
            words = place / "tool_configs" / "words.yaml"
            words.write_text(TOOLS + "  - {function: words_mod:shout, name: cry}\n")
            while "cry" not in {tool.name for tool in (await client.list_tools()).tools}:  # noqa: ASYNC110
                await anyio.sleep(0.1)  # another process, which looks at its files in its own time
            result = await client.call_tool("cry", {"text": "a"})
    assert [part.model_dump()["text"] for part in result.content] == ["A"]
