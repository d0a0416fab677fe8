"""Tests of configuration files in verl 0.7's format."""

from __future__ import annotations

import pytest

from gateway.config.entries import McpEntry
from tests.config.conftest import LoadConfig
from tests.conftest import Write

SERVERS = """
    {"mcpServers": {
        "SSE Server": {"url": "https://example.org/sse", "auth_token": "your_server_api_token"},
        "STDIO Server": {
            "command": "npx",
            "args": ["-y", "server-mcp@0.2.1"],
            "env": {"SERVER_API_KEY": "your_server_api_token"}
        }
    }}
"""


def test_mcp_entry_applies_to_every_server_of_its_file(write: Write, load_files: LoadConfig) -> None:
    write("tool_configs/mcp_server.json", SERVERS)
    write(
        "tool_configs/mcp_tool_config.yaml",
        """
        tools:
          - class_name: verl.tools.mcp_search_tool.MCPSearchTool
            config:
              rate_limit: 120
              timeout: 90
              type: mcp
              extra_of_the_hook: 7
            mcp:
              mcp_servers_config_path: ./mcp_server.json
              # optional
              tool_selected_list:
                - tavily_search_tool
                - STDIO Server_read
        """,
    )
    servers = load_files().servers
    assert [*servers] == ["SSE Server", "STDIO Server"]
    remote, local = servers.values()
    assert remote.server.auth_token is not None
    assert remote.server.auth_token.get_secret_value() == "your_server_api_token"
    assert (local.server.command, local.server.args) == ("npx", ("-y", "server-mcp@0.2.1"))
    assert local.server.env == {"SERVER_API_KEY": "your_server_api_token"}
    offer = remote.offer("tavily_search_tool")
    assert isinstance(offer, McpEntry)
    assert (offer.timeout_s, offer.rate_per_s) == (90.0, 120.0)
    assert offer.hook_for("tavily_search_tool") == "verl.tools.mcp_search_tool.MCPSearchTool"
    assert offer.hook_config == {"rate_limit": 120.0, "timeout": 90.0, "type": "mcp", "extra_of_the_hook": 7}
    assert local.offer("read") == offer, "with several servers, fastmcp calls it `STDIO Server_read`"
    assert remote.offer("read") is None
    assert local.offer("write") is None


@pytest.mark.parametrize("selected", ["tool_selected_list: {}", "tool_selected_list: []", "tool_selected_list:", ""])
def test_empty_selection_means_all_tools(selected: str, write: Write, load_files: LoadConfig) -> None:
    write("mcp_server.json", SERVERS)
    write(
        "tool_configs/mcp.yaml",
        f"""
        tools:
          - class_name: ""
            config:
                type: mcp
            mcp:
                mcp_servers_config_path: ./mcp_server.json
                {selected}
        """,
    )
    entry = load_files().servers["STDIO Server"]
    offer = entry.offer("whatever")
    assert offer is not None
    assert offer.hook_for("whatever") is None
    assert offer.owner == "tool_configs/mcp.yaml tools[0]"


def test_own_limits_take_precedence_over_verls(write: Write, load_files: LoadConfig) -> None:
    write("mcp_server.json", SERVERS)
    write(
        "tool_configs/mcp.yaml",
        """
        tools:
          - config: {use_mcp: true, rate_limit: 5, timeout: 9}
            mcp: {mcp_servers_config_path: mcp_server.json}
            timeout_s: 3
            at_once: 2
            prefix: "{server}_"
        """,
    )
    offer = load_files().servers["SSE Server"].offers[0]
    assert (offer.timeout_s, offer.rate_per_s, offer.at_once) == (3.0, 5.0, 2)
    assert offer.prefix_for("SSE Server") == "SSE Server_"
