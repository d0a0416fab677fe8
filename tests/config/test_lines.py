"""A mistake is told with the line that it is on, however late it is found."""

from __future__ import annotations

import pytest

from gateway.build import plan
from gateway.config.lines import line_of
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
def test_what_a_users_class_refuses_is_told_with_the_line_that_names_it(
    text: str, lines: tuple[str, ...], write: Write
) -> None:
    write("mine.py", "class Raises:\n    def __init__(self, *given):\n        raise ValueError('no')\n")
    with pytest.raises(ConfigError) as caught:
        plan(write("mine.yaml", text), None)
    told = str(caught.value)
    assert all(line in told for line in lines), told


def test_a_servers_file_with_tabs_and_dots_in_its_names_has_lines(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"servers\.json:5: mcpServers\['a\.b'\]\.comand: unknown key"):
        plan(None, write("servers.json", SERVERS))


@pytest.mark.parametrize("text", ["a: [", "a: \x07", "[" * 5000, "", "3", "a: &a [*a]"])
def test_a_file_that_cannot_be_read_again_only_lacks_its_line(text: str, write: Write) -> None:
    found = line_of(write("a.yaml", text), "b.c[3]")
    assert found is None
    assert line_of("none.yaml", "b") is None
    assert line_of("rows.jsonl", "b") is None
