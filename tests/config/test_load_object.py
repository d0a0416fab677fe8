"""Tests of loading Python objects that configuration files name, and of the lines in errors about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.build import build_plan
from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from tests.conftest import Write


def _error_of(name: str, near: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_object(name, near, "tools[0].function")
    assert str(caught.value).startswith(f"{near}: tools[0].function: ")
    return caught.value


@pytest.mark.parametrize("name", ["mine_a:Tool", "mine_a.Tool", "mine_a:Outer.Tool"])
def test_module_next_to_the_file_is_found(name: str, write: Write) -> None:
    write("tool_configs/mine_a.py", "class Tool:\n    pass\nclass Outer:\n    Tool = Tool")
    assert load_object(name, write("tool_configs/a.yaml", "")).__name__ == "Tool"


def test_module_may_import_its_neighbour_later(write: Write) -> None:
    write("tool_configs/mine_c.py", "def late():\n    import mine_d\n    return mine_d.value")
    write("tool_configs/mine_d.py", "value = 7")
    assert load_object("mine_c:late", write("tool_configs/a.yaml", ""))() == 7


def test_missing_names_are_reported_with_a_remedy_and_those_of_the_working_folder_are_found(write: Write) -> None:
    near = write("tool_configs/mine_e.py", "def calculate(): ...").with_name("a.yaml")
    assert _error_of("mine_e:calcluate", near).remedy == "did you mean 'calculate'?"
    missing = _error_of("mine_nowhere.tools:add", near)
    assert missing.problem == "there is no module 'mine_nowhere'" and "tool_configs" in missing.remedy
    write("mine_b/tools.py", "def add(): return 7")
    assert load_object("mine_b.tools:add", near)() == 7


def test_user_file_does_not_shadow_a_library(write: Write) -> None:
    write("tool_configs/json.py", "loads = None")
    assert load_object("json:loads", write("tool_configs/a.yaml", "")) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nraise RuntimeError('no licence')", "RuntimeError: no licence ({file}:2)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 ({file}:2)"),
        ("import mine_missing", "ModuleNotFoundError: No module named 'mine_missing' ({file}:1)"),
        ("def broken(:\n    pass", "SyntaxError: "),
    ],
)
def test_raising_module_is_reported_with_its_line(text: str, expected: str, write: Write) -> None:
    file = write("tool_configs/mine_f.py", text)
    error = _error_of("mine_f:add", write("tool_configs/a.yaml", ""))
    assert error.problem.startswith(f"importing 'mine_f' raised {expected.format(file=file)}")
    assert f"{file}:" in error.remedy


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
