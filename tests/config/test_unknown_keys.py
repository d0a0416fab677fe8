"""Tests that an unknown key anywhere in a file is reported with its location."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import load_config
from gateway.config.models import ResultLimit
from gateway.errors import ConfigErrors

COMPLETE_FILE: dict[str, Any] = {
    "tools": [
        {
            "class_name": "a.B",
            "config": {"type": "native", "own": {"own": 1}},
            "tool_schema": {"type": "function", "function": {"name": "b", "parameters": {"own": {}}}},
            "result_limit": {"chars": 5},
        },
        {"function": "a:b", "parameters": {"own": 1}, "result_limit": {"tokens": 5, "tokenizer": "t"}},
        {"server": "s", "parse_tools": {"own": "a:B"}},
        {"config": {"type": "mcp"}, "mcp": {"mcp_servers_config_path": "s.json"}},
    ],
    "interaction": [{"class_name": "a.BInteraction", "config": {"own": 1}}],
}
OPEN_FIELDS = ("config", "parameters", "parse_tools")


def _closed_mappings(value: Any, location: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every mapping that allows only known keys: its name in messages and the path to it."""
    if isinstance(value, dict):
        yield location, []
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        if step in OPEN_FIELDS:
            continue
        name = f"{location}[{step}]" if isinstance(step, int) else f"{location}.{step}".removeprefix(".")
        for label, path in _closed_mappings(inner, name):
            yield label, [step, *path]


LOCATIONS = list(_closed_mappings(COMPLETE_FILE))


@given(st.sampled_from(LOCATIONS), st.from_regex(r"zz[a-z_]{1,12}", fullmatch=True))
def test_unknown_key_is_reported_with_its_path(
    tmp_path_factory: Any, location: tuple[str, list[Any]], key: str
) -> None:
    label, path = location
    content = copy.deepcopy(COMPLETE_FILE)
    target = content
    for step in path:
        target = target[step]
    target[key] = 1
    file = Path(tmp_path_factory.mktemp("unknown")) / "a.yaml"
    file.write_text(yaml.safe_dump(content))
    try:
        load_config(file, None, {})
    except ConfigErrors as errors:
        problems = {(error.field, error.problem) for error in errors.errors}
    assert (f"{label}.{key}".removeprefix("."), "unknown key") in problems


def test_a_copy_of_settings_cannot_have_a_name_that_they_lack() -> None:
    with pytest.raises(AttributeError, match="ResultLimit has no characters_at_most"):
        ResultLimit(chars=5).model_copy(update={"characters_at_most": 5})
