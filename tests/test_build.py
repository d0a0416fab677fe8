"""Tests of building a gateway from configuration files, both verl's and our own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.build import build_plan
from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.types import Task, ToolCall
from tests.conftest import Write
from tests.servers.start_server import stdio_command


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("1", name, json.dumps(arguments))


VERL_TOOL_FILE = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config:
      type: native
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Checks an answer.
        parameters:
          type: object
          properties:
            answer: {anyOf: [{type: string}, {type: number}], minLength: 1}
          required: [answer]
        strict: false
"""

VERL_INTERACTION = """
interaction:
  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""


async def test_verl_files_load_unchanged(write: Write, tmp_path: Path) -> None:
    write("tool.yaml", VERL_TOOL_FILE)
    write("interaction.yaml", VERL_INTERACTION)
    task = Task(create={"calc_gsm8k_reward": {"ground_truth": "72"}}, feedback_args={"ground_truth": "72"})
    async with Gateway.load(tmp_path, None) as gateway, gateway.open(task) as session:
        (spec,) = session.specs
        assert spec.parameters["properties"]["answer"]["anyOf"][1] == {"type": "number"}
        assert (await session.call(call("calc_gsm8k_reward", answer="72"))).reward == 0.0
        heard = await session.feedback([{"role": "assistant", "content": "#### 72"}])
        assert (heard.done, heard.message, heard.score) == (True, "Your response is correct!", 1.0)
    assert [(reward.source, reward.kind, reward.value) for reward in session.rewards] == [
        ("calc_gsm8k_reward", "call", 0.0),
        ("gsm8k", "feedback", 1.0),
        ("calc_gsm8k_reward", "end", 1.0),
    ]


VERL_MCP = """
tools:
  - class_name: hooks_mod.Loud
    config: {type: mcp, rate_limit: 100, timeout: 7}
    mcp:
      mcp_servers_config_path: ./mcp_server.json
      tool_selected_list: [odd_echo, image]
"""

HOOK = """
from gateway.mcp_client.parse_hook import MCPBaseTool

class Loud(MCPBaseTool):
    def _parse_tool_result(self, content):
        assert self.tool_schema.function.name in ("echo", "image")
        text = " ".join(item.text.upper() for item in content if item.type == "text")
        return text, {"timeout": self.config["timeout"]}
"""


async def test_parse_hook_reads_results_of_selected_mcp_tools(write: Write, tmp_path: Path) -> None:
    command, args = stdio_command()
    servers = {"mcpServers": {"odd": {"command": command, "args": list(args)}}}
    write("mcp_server.json", json.dumps(servers))
    write("tools.yaml", VERL_MCP)
    write("hooks_mod.py", HOOK)
    with anyio.fail_after(60):
        async with Gateway.load(tmp_path, None) as gateway, gateway.open() as session:
            assert [spec.name for spec in session.specs] == ["echo", "image"]
            result = await session.call(call("echo", text="hello"))
            assert "HELLO" in result.text and result.metrics["timeout"] == 7
            picture = await session.call(call("image"))
            assert "Image" in [type(part).__name__ for part in picture.parts]


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("{}", "either in `chars` or in `tokens`"),
        ("{chars: 5, tokens: 5, tokenizer: t}", "either in `chars` or in `tokens`"),
        ("{tokens: 5}", "a `tokenizer` go together"),
        ("{tokens: 5, tokenizer: nowhere}", "nowhere has no tokenizer"),
        ("{tokens: 5, tokenizer: tool.yaml}", "cannot be loaded as a tokenizer"),
    ],
)
def test_invalid_result_limit_is_reported_at_load_time(write: Write, limit: str, words: str) -> None:
    write("tool.yaml", f"tools: [{{function: 'shutil:which', result_limit: {limit}}}]")
    with pytest.raises(ConfigError, match=rf"tool.yaml:1: tools\[0\].result_limit: .*{words}[\s\S]*remedy: "):
        build_plan(Path("tool.yaml"), None)


def test_gateway_loads_a_folder_without_a_servers_file_and_with_the_one_beside_it(write: Write) -> None:
    write("there/tools/tools.yaml", "tools: []\n")
    assert Gateway.load("there/tools").servers == ()
    write("there/mcp_servers.json", '{"mcpServers": {"calm": {"command": "calm"}}}')
    assert [server.name for server in Gateway.load("there/tools").servers] == ["calm"]
    assert Gateway.load("there/tools", None).servers == ()
    with pytest.raises(ConfigError, match="there is no such file"):
        Gateway.load("there/tools", "mcp_servers.json")
