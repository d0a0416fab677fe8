"""What the environment fills in, and that it stays out of sight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.entries import ClassEntry
from gateway.config.env import Expansion
from tests.config.conftest import Loaded, Refused
from tests.conftest import Write

plain = st.text().filter(lambda text: "${" not in text)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
trees = st.recursive(
    plain | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(trees, st.dictionaries(names, st.text()))
def test_without_a_variable_nothing_changes(tree: object, env: dict[str, str]) -> None:
    expansion = Expansion(env, "file")
    assert expansion.tree(tree) == tree
    assert not expansion.mistakes


@given(plain.filter(lambda text: not text.endswith("$")), names, st.text(), plain)
def test_a_value_stands_as_it_is_and_is_never_expanded_again(before: str, name: str, value: str, after: str) -> None:
    expansion = Expansion({name: value, "OTHER_ONE": "never"}, "file")
    assert expansion.text(f"{before}${{{name}}}{after}") == before + value + after


@given(names)
def test_a_value_that_looks_like_a_variable_stays_text(name: str) -> None:
    looks = "${OTHER_ONE} $${x} ${"
    expansion = Expansion({"OTHER_ONE": "never", name: looks}, "file")
    assert expansion.text(f"${{{name}}}") == looks
    assert not expansion.mistakes


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
        ("${oc.env:UNSET,default}", "default"),
    ],
)
def test_the_forms_of_a_variable(text: str, filled: str) -> None:
    expansion = Expansion({"SET": "value", "EMPTY": ""}, "file")
    assert expansion.text(text) == filled
    assert not expansion.mistakes


def test_a_missing_variable_is_one_mistake_with_its_remedy(write: Write, refused: Refused) -> None:
    write("mcp_servers.json", '{"mcpServers": {"web": {"url": "${WEB_URL}", "auth_token": "${WEB_TOKEN}"}}}')
    write("tool_configs/a.yaml", "tools: [{function: a:b, timeout_s: '${PATIENCE}', retries: '${1}'}]")
    assert refused() == (
        "tool_configs/a.yaml:1: tools[0].timeout_s: the environment variable PATIENCE is not set\n"
        "  remedy: export PATIENCE, or give it a default: `${PATIENCE:-...}`",
        "tool_configs/a.yaml:1: tools[0].retries: `${` begins no variable\n"
        "  remedy: write `${NAME}` or `${NAME:-default}`; `$${` is a plain `${`",
        "mcp_servers.json:1: mcpServers.web.url: the environment variable WEB_URL is not set\n"
        "  remedy: export WEB_URL, or give it a default: `${WEB_URL:-...}`",
        "mcp_servers.json:1: mcpServers.web.auth_token: the environment variable WEB_TOKEN is not set\n"
        "  remedy: export WEB_TOKEN, or give it a default: `${WEB_TOKEN:-...}`",
    )


def test_a_wrong_value_is_blamed_on_its_variable_and_not_shown(write: Write, refused: Refused) -> None:
    write("tool_configs/a.yaml", "tools: [{function: '${WHAT}', timeout_s: '${PATIENCE}'}]")
    messages = refused({"PATIENCE": "hunter2", "WHAT": "hunter2"})
    assert "hunter2" not in "".join(messages)
    assert messages[0] == (
        "tool_configs/a.yaml:1: tools[0].timeout_s: expected a valid number, found a text from PATIENCE\n"
        "  remedy: the value comes from PATIENCE: change it there"
    )


def test_numbers_and_nested_settings_may_come_from_the_environment(write: Write, loaded: Loaded) -> None:
    write("tool_configs/a.yaml", "tools: [{class_name: a.B, timeout_s: '${T}', config: {keys: ['${K}']}}]")
    (entry,) = loaded({"T": "2.5", "K": "k"}).tools
    assert isinstance(entry, ClassEntry)
    assert (entry.timeout_s, entry.config) == (2.5, {"keys": ["k"]})
