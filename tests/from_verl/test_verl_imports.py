"""Files that import verl run as they are where verl is not installed, and verl's own classes go first where it is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.find import find
from gateway.errors import ConfigError
from gateway.verl.offered import OFFERED
from tests.conftest import Write

NAMES = [(module, name) for module, names in OFFERED.items() for name in names]


def test_verl_is_not_installed_here() -> None:
    assert importlib.util.find_spec("verl") is None


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_a_users_file_imports_each_name_that_is_offered(module: str, name: str, write: Write) -> None:
    near = write("tools.yaml", "")
    write("theirs.py", f"from {module} import {name}\nfound = {name}")
    found = find("theirs:found", near)
    assert found is not None
    assert found.__module__.partition(".")[0] == "gateway"
    assert find(f"{module}.{name}", near) is found


def test_all_ways_of_importing_give_the_same_objects(write: Write) -> None:
    text = """
    import verl
    import verl.tools.schemas as schemas
    from verl.tools import base_tool
    from verl.utils.reward_score import gsm8k
    from verl.tools.schemas import ToolResponse
    same = schemas.ToolResponse is ToolResponse is base_tool.ToolResponse is verl.tools.schemas.ToolResponse
    score = gsm8k.compute_score("so #### 42", "42", method="strict", format_score=0.0, score=1.0)
    version = verl.__version__
    """
    write("theirs.py", text)
    near = write("tools.yaml", "")
    assert find("theirs:same", near) is True
    assert find("theirs:score", near) == 1.0
    assert find("theirs:version", near) == "0.7.1"


def test_an_import_inside_a_method_works_after_loading(write: Write) -> None:
    write("theirs.py", "def late():\n    from verl.utils.reward_score import gsm8k\n    return gsm8k.compute_score")
    late = find("theirs:late", write("tools.yaml", ""))
    assert "verl" not in sys.modules
    assert late()("#### 7", "7") == 1.0


def test_a_neighbour_of_the_users_file_may_import_verl_later_too(write: Write) -> None:
    write("theirs.py", "import theirs_too")
    write("theirs_too.py", "def late():\n    from verl.tools.schemas import ToolResponse\n    return ToolResponse")
    assert find("theirs:theirs_too.late", write("tools.yaml", ""))().__name__ == "ToolResponse"


def test_nobody_else_sees_a_verl_that_is_not_there(write: Write) -> None:
    write("theirs.py", "def late():\n    from verl.tools.schemas import ToolResponse\n    return ToolResponse")
    find("theirs:late", write("tools.yaml", ""))
    assert importlib.util.find_spec("verl") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl'"):
        importlib.import_module("verl.tools.schemas")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("from verl.tools.sandbox_fusion_tools import SandboxFusionTool", "run the sandbox as an MCP server"),
        ("from verl.tools.schemas import Absent", "verl.tools.schemas (OpenAIFunction"),
        ("from verl import DataProto", "a reward function is given one attempt here"),
        ("import verl.utils.torch_functional", "offered: verl.interactions.base (BaseInteraction)"),
    ],
)
def test_a_name_that_is_not_offered_is_refused_with_line_and_what_is(line: str, told: str, write: Write) -> None:
    file = write("theirs.py", f"import json\n{line}")
    with pytest.raises(ConfigError) as caught:
        find("theirs:json", write("tools.yaml", ""), "tools[0].class_name")
    assert f"({file}:2)" in caught.value.problem
    assert told in caught.value.problem
    assert caught.value.remedy == f"install verl, or change what is imported at {file}:2"


def test_a_class_of_verls_that_is_not_offered_is_refused_where_the_file_names_it(write: Write) -> None:
    near = write("tools.yaml", "")
    with pytest.raises(ConfigError) as caught:
        find("verl.tools.search_tool.SearchTool", near, "tools[0].class_name")
    assert str(caught.value).startswith(f"{near}: tools[0].class_name: there is no module 'verl.tools.search_tool'")
    assert "run the search as an MCP server" in caught.value.remedy
    with pytest.raises(ConfigError, match="has no 'Nothing'"):
        find("verl.tools.schemas.Nothing", near)


def test_an_installed_verl_goes_first(write: Write) -> None:
    """In a process of its own, with a package of that name on the path."""
    write("lib/verl/__init__.py", "")
    write("lib/verl/tools/__init__.py", "")
    write("lib/verl/tools/base_tool.py", "class BaseTool:\n    theirs = True")
    near = write("conf/tools.yaml", "")
    write("conf/theirs.py", "from verl.tools.base_tool import BaseTool\nclass Mine(BaseTool): ...")
    text = (
        "from pathlib import Path\n"
        "from gateway.config.find import find\n"
        f"near = Path({str(near)!r})\n"
        "assert find('verl.tools.base_tool.BaseTool', near).theirs\n"
        "assert find('theirs.Mine', near).theirs\n"
        "import verl; assert 'lib' in verl.__file__\n"
        # What later releases took out is still to be had.
        "assert find('verl.interactions.base.BaseInteraction', near).__module__ == 'gateway.verl.base'\n"
    )
    root, lib = str(Path(__file__).parents[2]), str(near.parents[1] / "lib")
    text = f"import sys; sys.path[:0] = [{lib!r}, {root!r}]\n{text}"
    done = subprocess.run([sys.executable, "-c", text], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_clone_where_the_command_was_started_is_no_installed_verl(write: Write) -> None:
    write("verl/__init__.py", "from verl.protocol import DataProto")
    write("verl/protocol.py", "import a_package_that_is_not_installed")
    write("verl/tools/__init__.py", "")
    write("verl/tools/base_tool.py", "import a_package_that_is_not_installed")
    write("verl/tools/mine.py", "from verl.tools.base_tool import BaseTool\nclass Mine(BaseTool): ...")
    write("conf/theirs.py", "from verl.tools.base_tool import BaseTool\nclass Theirs(BaseTool): ...")
    near = write("conf/tools.yaml", "")
    assert find("theirs.Theirs", near).__base__.__module__ == "gateway.verl.base"
    assert find("verl.tools.mine.Mine", near).__base__.__module__ == "gateway.verl.base", "a file of one's own in it"
    with pytest.raises(ConfigError, match=r"there is no module 'verl\.tools\.search_tool'"):
        find("verl.tools.search_tool.SearchTool", near)


def test_a_clone_that_is_on_the_path_already_goes_first(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    near = write("tools.yaml", "")
    write("verl/__init__.py", "")
    write("verl/tools/__init__.py", "")
    write("verl/tools/base_tool.py", "class BaseTool:\n    theirs = True")
    monkeypatch.syspath_prepend(str(near.parent))
    assert find("verl.tools.base_tool.BaseTool", near).theirs


def test_a_package_that_a_users_file_lacks_is_to_be_installed(write: Write) -> None:
    file = write("theirs.py", "import json\nimport a_package_that_is_not_installed")
    with pytest.raises(ConfigError) as caught:
        find("theirs:json", write("tools.yaml", ""))
    assert caught.value.remedy == f"install a_package_that_is_not_installed, or change what is imported at {file}:2"
