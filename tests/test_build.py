"""Tests of building a gateway from configuration files, both verl's and our own format."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.build import build_plan
from gateway.errors import ConfigError
from gateway.gateway import Gateway

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files into a configuration folder whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(**files: str) -> Path:
        for name, text in files.items():
            stem, _, suffix = name.rpartition("_")
            (tmp_path / f"{stem}.{suffix}").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("{}", r"tools\[0\].result_limit: a limit is either in `chars` or in `tokens`"),
        (
            "{chars: 5, tokens: 5, tokenizer: t}",
            r"tools\[0\].result_limit: a limit is either in `chars` or in `tokens`",
        ),
        ("{tokens: 5}", r"tools\[0\].result_limit: a limit in `tokens` and a `tokenizer` go together"),
        ("{tokens: 5, tokenizer: nowhere}", r"tools\[0\].result_limit: nowhere has no tokenizer"),
        ("{tokens: 5, tokenizer: tool.yaml}", r"tools\[0\].result_limit: tool.yaml cannot be loaded as a tokenizer"),
    ],
)
def test_invalid_result_limit_is_reported_at_load_time(write: Write, limit: str, words: str) -> None:
    folder = write(tool_yaml=f"tools: [{{function: 'shutil:which', result_limit: {limit}}}]")
    with pytest.raises(ConfigError, match=rf"tool.yaml:1: {words}[\s\S]*remedy: "):
        build_plan(folder, None)


def test_gateway_loads_a_folder_without_a_servers_file_and_with_the_one_beside_it(write: Write) -> None:
    folder = write()
    (folder / "there/tools").mkdir(parents=True)
    (folder / "there/tools/tools.yaml").write_text("tools: []\n")
    assert Gateway.load("there/tools").servers == ()
    (folder / "there/mcp_servers.json").write_text('{"mcpServers": {"calm": {"command": "calm"}}}')
    assert [server.name for server in Gateway.load("there/tools").servers] == ["calm"]
    assert Gateway.load("there/tools", None).servers == ()
    with pytest.raises(ConfigError, match="there is no such file"):
        Gateway.load("there/tools", "mcp_servers.json")
