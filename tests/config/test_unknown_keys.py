"""A key that nobody knows is reported with its place, wherever it stands."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import load
from gateway.config.read import MOST_BYTES
from gateway.errors import ConfigErrors

WHOLE: dict[str, Any] = {
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
FREE = ("config", "parameters", "parse_tools")


def _closed(value: Any, place: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every mapping that has keys of ours only: how a message names it, and the way to it."""
    if isinstance(value, dict):
        yield place, []
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        if step in FREE:
            continue
        name = f"{place}[{step}]" if isinstance(step, int) else f"{place}.{step}".removeprefix(".")
        for found, way in _closed(inner, name):
            yield found, [step, *way]


PLACES = list(_closed(WHOLE))


@given(st.sampled_from(PLACES), st.from_regex(r"zz[a-z_]{1,12}", fullmatch=True))
def test_an_unknown_key_anywhere_is_reported_with_its_path(
    tmp_path_factory: Any, place: tuple[str, list[Any]], key: str
) -> None:
    named, way = place
    whole = copy.deepcopy(WHOLE)
    target = whole
    for step in way:
        target = target[step]
    target[key] = 1
    file = Path(tmp_path_factory.mktemp("unknown")) / "a.yaml"
    file.write_text(yaml.safe_dump(whole))
    try:
        load(file, None, {})
    except ConfigErrors as errors:
        found = {(error.field, error.problem) for error in errors.errors}
    assert (f"{named}.{key}".removeprefix("."), "unknown key") in found


def test_every_closed_mapping_is_among_the_places_tried() -> None:
    assert {place for place, _ in PLACES} >= {
        "",
        "tools[0]",
        "tools[0].tool_schema.function",
        "tools[1].result_limit",
        "tools[3].mcp",
        "interaction[0]",
    }
    assert len(yaml.safe_dump(WHOLE)) < MOST_BYTES
