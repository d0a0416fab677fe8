"""Tests of the line numbers in configuration errors."""

from __future__ import annotations

import pytest

from gateway.build import build_plan
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
