"""Tests of configuration files in verl 0.7's format."""

from __future__ import annotations

import pytest

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
