"""Objects that files name, and the ways in which a name can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.find import find
from gateway.errors import ConfigError
from tests.conftest import Write


def _refusal(name: str, near: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find(name, near, "tools[0].function")
    assert str(caught.value).startswith(f"{near}: tools[0].function: ")
    return caught.value


@pytest.mark.parametrize("name", ["mine_a:Tool", "mine_a.Tool", "mine_a:Outer.Tool"])
def test_a_module_beside_the_file_is_found(name: str, write: Write) -> None:
    write("tool_configs/mine_a.py", "class Tool:\n    pass\nclass Outer:\n    Tool = Tool")
    assert find(name, write("tool_configs/a.yaml", "")).__name__ == "Tool"


def test_a_module_of_the_working_folder_is_found_from_a_relative_file(write: Write) -> None:
    write("mine_b/tools.py", "def add(): return 7")
    write("tool_configs/a.yaml", "")
    assert find("mine_b.tools:add", Path("tool_configs/a.yaml"))() == 7


def test_a_module_may_import_its_neighbour_later(write: Write) -> None:
    write("tool_configs/mine_c.py", "def late():\n    import mine_d\n    return mine_d.value")
    write("tool_configs/mine_d.py", "value = 7")
    assert find("mine_c:late", write("tool_configs/a.yaml", ""))() == 7


def test_no_file_of_a_user_stands_in_for_a_library(write: Write) -> None:
    write("tool_configs/json.py", "loads = None")
    assert find("json:loads", write("tool_configs/a.yaml", "")) is not None


def test_a_module_that_is_not_there_is_named_with_the_folders_looked_into(write: Write) -> None:
    error = _refusal("mine_nowhere.tools:add", write("tool_configs/a.yaml", ""))
    assert error.problem == "there is no module 'mine_nowhere'"
    assert "tool_configs" in error.remedy


def test_a_missing_attribute_gets_the_name_that_was_meant(write: Write) -> None:
    file = write("tool_configs/mine_e.py", "def calculate(): ...")
    near = write("tool_configs/a.yaml", "")
    error = _refusal("mine_e:calcluate", near)
    assert error.problem == f"'mine_e' ({file}) has no 'calcluate'"
    assert error.remedy == "did you mean 'calculate'?"
    assert "rename the module" in _refusal("math:zzz", near).remedy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\nraise RuntimeError('no licence')", "RuntimeError: no licence ({file}:2)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 ({file}:2)"),
        ("import mine_missing", "ModuleNotFoundError: No module named 'mine_missing' ({file}:1)"),
        ("def broken(:\n    pass", "SyntaxError: "),
    ],
)
def test_a_module_that_raises_shows_the_last_line_of_its_traceback(text: str, told: str, write: Write) -> None:
    file = write("tool_configs/mine_f.py", text)
    error = _refusal("mine_f:add", write("tool_configs/a.yaml", ""))
    assert error.problem.startswith(f"importing 'mine_f' raised {told.format(file=file)}")
    assert f"{file}:" in error.remedy
