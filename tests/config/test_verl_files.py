"""Tests of configuration files in verl 0.7's format."""

from __future__ import annotations

import pytest

from gateway.config.entries import ClassEntry, McpEntry
from tests.config.conftest import LoadConfig, LoadErrors
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


def test_native_class_keeps_its_config_and_schema(write: Write, load_files: LoadConfig) -> None:
    write(
        "tool_configs/search.yaml",
        """
        tools:
          - class_name: "verl.tools.search_tool.SearchTool"
            config: {
              "retrieval_service_url": "http://127.0.0.1:8000/retrieve",
              "rate_limit": 120,
              "timeout": 30,
              "type": "native"
            }
            tool_schema:
              type: "function"
              function:
                name: "search"
                description: "Searches the web for relevant information based on the given query."
                parameters:
                  type: "object"
                  properties:
                    query_list:
                      type: "array"
                      item:
                        type: "string"
                      minItems: 1
                    since: {anyOf: [{type: string, format: date, default: 2024-01-01}, {type: "null"}]}
                    node: {$ref: "#/$defs/node"}
                    tolerance: {type: number, maximum: 1e-5}
                  required: ["query_list"]
                  $defs: {node: {type: object}}
        """,
    )
    (entry,) = load_files().tools
    assert isinstance(entry, ClassEntry)
    assert entry.config == {
        "retrieval_service_url": "http://127.0.0.1:8000/retrieve",
        "rate_limit": 120,
        "timeout": 30,
        "type": "native",
    }
    assert entry.timeout_s == 60.0, "the timeout in its config is the class's own affair"
    assert entry.tool_schema is not None
    assert entry.tool_schema.function.name == "search"
    parameters = entry.tool_schema.function.parameters
    assert parameters["properties"]["query_list"] == {"type": "array", "item": {"type": "string"}, "minItems": 1}
    assert parameters["properties"]["since"]["anyOf"][0]["default"] == "2024-01-01"
    assert parameters["properties"]["node"] == {"$ref": "#/$defs/node"}
    assert parameters["properties"]["tolerance"]["maximum"] == 1e-5
    assert parameters["$defs"] == {"node": {"type": "object"}}


def test_native_class_may_define_its_own_schema(write: Write, load_files: LoadConfig) -> None:
    write(
        "tool_configs/own.yaml",
        """
        tools:
          - class_name: "custom.tools.OwnTool"
            config:
              type: native
            tool_schema:
        """,
    )
    (entry,) = load_files().tools
    assert isinstance(entry, ClassEntry)
    assert entry.tool_schema is None
    assert entry.owner == "tool_configs/own.yaml tools[0]"


def test_tool_without_parameters_takes_none(write: Write, load_files: LoadConfig) -> None:
    write(
        "tool_configs/now.yaml",
        """
        tools:
          - class_name: custom.tools.Now
            config: {}
            tool_schema: {type: function, function: {name: now, description: null}}
        """,
    )
    (entry,) = load_files().tools
    assert isinstance(entry, ClassEntry)
    assert entry.tool_schema is not None
    assert entry.tool_schema.function.parameters == {"type": "object", "properties": {}}


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


def test_servers_file_named_twice_is_read_once(write: Write, load_files: LoadConfig) -> None:
    write("mcp_servers.json", SERVERS)
    write(
        "tool_configs/mcp.yaml",
        """
        tools:
          - mcp: {mcp_servers_config_path: ../mcp_servers.json, tool_selected_list: [a]}
            class_name: custom.hooks.A
          - mcp: {mcp_servers_config_path: ../mcp_servers.json, tool_selected_list: [b]}
            timeout_s: 5
        """,
    )
    config = load_files()
    entry = config.servers["SSE Server"]
    first, second = entry.offer("a"), entry.offer("b")
    assert first is not None
    assert second is not None
    assert (first.hook_for("a"), second.hook_for("b"), second.timeout_s) == ("custom.hooks.A", None, 5.0)
    assert [file.name for file in config.files] == ["mcp.yaml", "mcp_servers.json"]


def test_missing_servers_file_is_reported_with_the_searched_paths(write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/mcp.yaml", "tools: [{config: {type: mcp}, mcp: {mcp_servers_config_path: ./mcp_server.json}}]")
    (message,) = load_errors()
    assert message == (
        "tool_configs/mcp.yaml:1: tools[0].mcp.mcp_servers_config_path: "
        "there is no servers file tool_configs/mcp_server.json nor mcp_server.json\n"
        "  remedy: create it, or correct the path"
    )


def test_interaction_name_comes_from_the_file_or_class(write: Write, load_files: LoadConfig) -> None:
    write(
        "tool_configs/interaction.yaml",
        """
        interaction:
          - class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
            config: {}
          - name: "custom_solver"
            class_name: "custom.interactions.CustomInteraction"
            config:
              solver_type: "advanced"
              timeout: 30
          - name: "code_verifier"
            class_name: "verl.interactions.base.BaseInteraction"
            config:
              verification_mode: "strict"
          - class_name: custom.users.Patient
        """,
    )
    interactions = load_files().interactions
    assert [entry.name for entry in interactions] == ["gsm8k", "custom_solver", "code_verifier", "patient"]
    assert interactions[1].config == {"solver_type": "advanced", "timeout": 30, "name": "custom_solver"}


def test_single_interaction_needs_no_list(write: Write, load_files: LoadConfig) -> None:
    write("tool_configs/one.yaml", "interaction: {class_name: my.own.GuessInteraction, config: {}}")
    (entry,) = load_files().interactions
    assert (entry.name, entry.owner) == ("guess", "tool_configs/one.yaml interaction[0]")


def test_duplicate_interaction_name_names_both_owners(write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/a.yaml", "interaction: [{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}]")
    write("tool_configs/b.yaml", "interaction: [{class_name: my.Other}, {class_name: my.Checker, name: gsm8k}]")
    (message,) = load_errors()
    assert message == (
        "tool_configs/b.yaml:1: interaction[1]: two interactions are named 'gsm8k': "
        "one of tool_configs/a.yaml interaction[0], one of tool_configs/b.yaml interaction[1]\n"
        "  remedy: give one of them another `name`"
    )


def test_verls_template_file_reports_what_to_fill_in(write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/native.yaml", 'tools: [{class_name: "", config: {type: native}, tool_schema: }]')
    write("tool_configs/user.yaml", 'interaction: [{class_name: "", config: {}}]')
    native, user = load_errors()
    assert native.startswith("tool_configs/native.yaml:1: tools[0].class_name: expected a name, found ''")
    assert "write `package.module:name`" in user
