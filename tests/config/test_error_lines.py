"""Tests of the line numbers in configuration errors."""

from __future__ import annotations

import pytest

from gateway.build import build_plan
from gateway.config.diagnostics import locate_field
from gateway.errors import ConfigError
from tests.conftest import Write

INTERACTIONS = """\
interaction:
  - name: fine
    class_name: gateway.feedback.gsm8k.Gsm8kInteraction
  - name: mine
    class_name: mine.Raises
    config:
      wall: 3
"""
TOOLS = """\
tools:
  # a tool
  - class_name: mine.Raises
    config: {}
    tool_schema: {function: {name: a}}
  - function: mine:nowhere
"""
SERVERS = '{\n\t"mcpServers": {\n\t\t"a.b": {\n\t\t\t"command": "x",\n\t\t\t"comand": "x"\n\t\t}\n\t}\n}'


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (INTERACTIONS, ("mine.yaml:5: interaction[1].class_name: interaction 'mine'",)),
        (TOOLS, ("mine.yaml:3: tools[0]", "mine.yaml:6: tools[1].function")),
    ],
)
def test_error_of_a_user_class_has_the_line_that_names_it(text: str, lines: tuple[str, ...], write: Write) -> None:
    write("mine.py", "class Raises:\n    def __init__(self, *given):\n        raise ValueError('no')\n")
    with pytest.raises(ConfigError) as caught:
        build_plan(write("mine.yaml", text), None)
    message = str(caught.value)
    assert all(line in message for line in lines), message


def test_lines_are_found_in_json_with_tabs_and_dotted_names(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"servers\.json:5: mcpServers\['a\.b'\]\.comand: unknown key"):
        build_plan(None, write("servers.json", SERVERS))


@pytest.mark.parametrize("text", ["a: [", "a: \x07", "[" * 5000, "", "3", "a: &a [*a]"])
def test_error_has_no_line_if_the_file_is_unreadable(text: str, write: Write) -> None:
    location = locate_field(write("a.yaml", text), "b.c[3]")
    assert location is None
    assert locate_field("none.yaml", "b") is None
    assert locate_field("rows.jsonl", "b") is None
