"""Tests of the `mtrl-gateway` command in a separate process, with real files, ports and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import TIMEOUT_S, TOOLS, WORDS_MODULE, make_place, run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


@contextmanager
def start_serve(place: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], str]]]:
    """A running `serve` process, and a function that waits for a line of its output."""
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--wait", "all"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, cwd=place, env=environment, stdout=pipe, stderr=both, text=True) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()

        def until(pattern: str) -> str:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if match := re.search(pattern, line):
                    return match[match.lastindex or 0]
            raise AssertionError(f"{pattern} never came; seen: {''.join(lines)}")

        try:
            yield process, until
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            watchdog.cancel()
            process.kill()


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def test_list_shows_every_tool_with_its_json_schema(place: Path) -> None:
    listed = json.loads(run(place, "list", "--json").stdout)
    (shout,) = [tool for tool in listed["data"] if tool["function"]["name"] == "shout"]
    assert listed["object"] == "list" and shout["type"] == "function"
    assert shout["function"]["parameters"]["required"] == ["text"]


def test_list_in_a_pipe_has_one_tool_a_line_with_tabs_between_its_fields(place: Path) -> None:
    words = "def long(text: str, other: int = 3):\n    " + f'"""{"Says much. " * 40}\tafter a tab\n\nMore."""\n'
    (place / "tool_configs/words_mod.py").write_text(WORDS_MODULE + words)
    (place / "tool_configs/words.yaml").write_text(TOOLS + "  - function: words_mod:long\n")
    for options in (["list"], ["list", "--plain"]):
        lines = [line.split("\t") for line in run(place, *options).stdout.splitlines()]
        listed = {name: fields for name, *fields in lines}
        assert {len(fields) for fields in listed.values()} == {4}
        assert listed["shout"] == ["policy", "{text: string}", "Says it louder.", "tool_configs/words.yaml tools[0]"]
        assert listed["long"][2].endswith("Says much. after a tab") and listed["echo"][3] == "mcp server 'odd'"


def test_list_ends_quietly_when_its_reader_has_enough(place: Path) -> None:
    source = "".join(f"def tool_{number}() -> str:\n    return ''\n\n" for number in range(1500))
    (place / "tool_configs/words_mod.py").write_text(source)
    tools = "".join(f"  - function: words_mod:tool_{number}\n" for number in range(1500))
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


def test_call_prints_text_and_saves_images_to_new_files(place: Path) -> None:
    assert run(place, "call", "shout", '{"text": "hey"}').stdout == "HEY\n"
    for number in (1, 2):
        printed = run(place, "call", "picture", "--save", "out").stdout
        assert f"out/picture-{number}.png (3x2, image/png)" in printed
        assert (place / "out" / f"picture-{number}.png").is_file()


def test_check_names_the_failing_server_with_reason_and_remedy(place: Path) -> None:
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
    assert "1 to fix" in printed


def test_config_error_is_printed_without_traceback(place: Path) -> None:
    (place / "tool_configs/words.yaml").write_text("tools: [")
    for command in (["list"], ["check"], ["call", "shout"], ["serve"], ["stdio"]):
        output = run(place, *command, code=2).stderr
        assert "words.yaml" in output and "Traceback" not in output


def test_serve_reloads_changed_files_and_ignores_invalid_ones(place: Path) -> None:
    yaml = place / "tool_configs" / "words.yaml"
    with start_serve(place) as (process, until):
        url = until(r"(http://127\.0\.0\.1:\d+)") + "/v1"

        def names() -> list[str]:
            return [tool["function"]["name"] for tool in ask(f"{url}/tools")["data"]]

        session = ask(f"{url}/sessions", {"tools": ["shout"]})["id"]
        yaml.write_text(TOOLS.replace("words_mod:spell", "words_mod:shout\n    name: scream"))
        until("reloaded the configuration")
        assert "scream" in names() and "spell" not in names()
        yaml.write_text("tools: [")
        process.send_signal(signal.SIGHUP)
        until("the new configuration is invalid, so the old one stays in use")
        assert "scream" in names()
        calls = [{"id": "1", "type": "function", "function": {"name": "shout", "arguments": '{"text": "a"}'}}]
        answer = ask(f"{url}/sessions/{session}/calls", {"tool_calls": calls})
        assert answer["messages"][0]["content"] == "A"


def test_logs_are_json_lines_with_time_and_level() -> None:
    """Also of exceptions and of several lines."""
    code = (
        "import logging\nfrom gateway.cli import _configure_logging\n"
        "_configure_logging(log_json=True)\nlog = logging.getLogger('gateway.x')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('a\\nb %s', 1)\n"
        "log.error('c', extra={'fields': {'caller': 'alice'}})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    first, second = map(json.loads, done.stderr.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (first["level"], first["logger"], first["message"]) == ("ERROR", "gateway.x", "a\nb 1")
    assert "ZeroDivisionError" in first["exception"]
    assert (second["message"], second["caller"]) == ("c", "alice")


HEAVY = {"torch", "transformers", "numpy", "pandas", "av", "trainer", "rich", "jsonschema", "openai"}
MOST_MODULES = 1200
"""Of 1,130 that are loaded; each takes about a millisecond of processor time."""


def test_serve_without_servers_loads_few_modules(tmp_path: Path) -> None:
    """It listens within two seconds of processor time."""
    (tmp_path / "mcp_servers.json").write_text('{"mcpServers": {}}')
    (tmp_path / "tool_configs").mkdir()
    command = [sys.executable, "-X", "importtime", "-m", "gateway.cli", "serve", "--port", "0"]
    with (tmp_path / "imports").open("w+") as imports:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=imports, text=True, cwd=tmp_path)
        try:
            assert process.stdout is not None and "http://" in process.stdout.readline()
        finally:
            process.kill()
            process.communicate()
        imports.seek(0)
        names = {line.rpartition("|")[2].strip() for line in imports if line.startswith("import time:")}
    assert HEAVY & {name.partition(".")[0] for name in names} == set()
    assert 500 < len(names) < MOST_MODULES
