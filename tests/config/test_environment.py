"""Tests of environment variables in configuration files."""

from __future__ import annotations

import pytest

from gateway.config.environment import Expansion
from tests.config.conftest import LoadErrors
from tests.conftest import Write


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("${SET}", "value"),
        ("a ${SET} b ${SET:-x}", "a value b value"),
        ("${UNSET:-a default: with ${ in it}", "a default: with ${ in it"),
        ("${UNSET:-}", ""),
        ("${EMPTY:-default}", "default"),
        ("${EMPTY}", ""),
        ("$${SET}", "${SET}"),
        ("$SET $$ {SET}", "$SET $$ {SET}"),
        ("${oc.env:SET}", "value"),
        ("${NESTED} b", "${SET} $$ b"),
        ("${oc.env:UNSET,default}", "default"),
    ],
)
def test_variable_forms_expand(text: str, filled: str) -> None:
    expansion = Expansion({"SET": "value", "EMPTY": "", "NESTED": "${SET} $$"}, "file")
    assert expansion.expand_text(text) == filled
    assert not expansion.errors


def test_missing_variable_is_one_error_with_a_remedy(write: Write, load_errors: LoadErrors) -> None:
    write("mcp_servers.json", '{"mcpServers": {"web": {"url": "${WEB_URL}", "auth_token": "${WEB_TOKEN}"}}}')
    write("tool_configs/a.yaml", "tools: [{function: a:b, timeout_s: '${PATIENCE}', retries: '${1}'}]")
    for error, words in zip(
        load_errors(),
        (
            "a.yaml:1: tools[0].timeout_s: the environment variable PATIENCE is not set\n  remedy: export PATIENCE",
            "a.yaml:1: tools[0].retries: `${` does not begin a variable\n  remedy: write `${NAME}`",
            "mcp_servers.json:1: mcpServers.web.url: the environment variable WEB_URL is not set",
            "mcp_servers.json:1: mcpServers.web.auth_token: the environment variable WEB_TOKEN is not set",
        ),
        strict=True,
    ):
        assert words in error


def test_invalid_value_names_its_variable_but_is_not_shown(write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/a.yaml", "tools: [{function: '${WHAT}', timeout_s: '${PATIENCE}'}]")
    messages = load_errors({"PATIENCE": "hunter2", "WHAT": "hunter2"})
    assert "hunter2" not in "".join(messages)
    assert messages[0] == (
        "tool_configs/a.yaml:1: tools[0].timeout_s: expected a valid number, found a text from PATIENCE\n"
        "  remedy: the value comes from PATIENCE: change it there"
    )
