"""Tests of imports of verl in users' files: stand-ins where verl is not installed, verl's own classes where it is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from mtrl_plugins.verl.base import BaseTool
from mtrl_plugins.verl.compat_names import OFFERED
from tests.conftest import Write

NAMES = [(module, name) for module, names in OFFERED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_each_offered_name_can_be_imported(module: str, name: str, write: Write) -> None:
    tools_file = write("tools.yaml", "")
    write("theirs.py", f"from {module} import {name}\nfound = {name}")
    imported = load_object("theirs:found", tools_file)
    assert imported is not None
    assert imported.__module__.partition(".")[0] in ("gateway", "mtrl_plugins")
    assert load_object(f"{module}.{name}", tools_file) is imported


def test_all_forms_of_import_give_the_same_objects(write: Write) -> None:
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
    tools_file = write("tools.yaml", "")
    assert load_object("theirs:same", tools_file) is True
    assert load_object("theirs:score", tools_file) == 1.0
    assert load_object("theirs:version", tools_file) == "0.7.1"


def test_an_import_inside_a_function_works_after_loading(write: Write) -> None:
    write("theirs.py", "def late():\n    from verl.utils.reward_score import gsm8k\n    return gsm8k.compute_score")
    late = load_object("theirs:late", write("tools.yaml", ""))
    assert "verl" not in sys.modules
    assert late()("#### 7", "7") == 1.0


def test_other_code_cannot_import_the_stand_ins(write: Write) -> None:
    write("theirs.py", "def late():\n    from verl.tools.schemas import ToolResponse\n    return ToolResponse")
    load_object("theirs:late", write("tools.yaml", ""))
    assert importlib.util.find_spec("verl") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl'"):
        importlib.import_module("verl.tools.schemas")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from verl.tools.sandbox_fusion_tools import SandboxFusionTool", "run the sandbox as an MCP server"),
        ("from verl.tools.schemas import Absent", "offered: OpenAIFunctionPropertySchema, "),
        ("from verl import DataProto", "a reward function gets one attempt"),
        ("import verl.utils.torch_functional", "offered: verl.interactions.base, "),
    ],
)
def test_a_name_that_is_not_offered_is_refused_with_line_and_alternatives(
    line: str, message: str, write: Write
) -> None:
    file = write("theirs.py", f"import json\n{line}")
    with pytest.raises(ConfigError) as caught:
        load_object("theirs:json", write("tools.yaml", ""), "tools[0].class_name")
    assert f"({file}:2)" in caught.value.problem
    assert message in caught.value.problem
    assert caught.value.remedy == f"install verl, or change what is imported at {file}:2"


def test_a_class_that_is_not_offered_is_refused_with_the_tools_file(write: Write) -> None:
    tools_file = write("tools.yaml", "")
    with pytest.raises(ConfigError) as caught:
        load_object("verl.tools.search_tool.SearchTool", tools_file, "tools[0].class_name")
    assert str(caught.value).startswith(
        f"{tools_file}: tools[0].class_name: there is no module 'verl.tools.search_tool'"
    )
    assert "run the search as an MCP server" in caught.value.remedy
    with pytest.raises(ConfigError, match="has no 'Nothing'"):
        load_object("verl.tools.schemas.Nothing", tools_file)


def test_an_installed_verl_takes_precedence(write: Write) -> None:
    """In a separate process, with a package of that name on the path."""
    write("lib/verl/__init__.py", "")
    write("lib/verl/tools/__init__.py", "")
    write("lib/verl/tools/base_tool.py", "class BaseTool:\n    theirs = True")
    tools_file = write("conf/tools.yaml", "")
    write("conf/theirs.py", "from verl.tools.base_tool import BaseTool\nclass Mine(BaseTool): ...")
    text = (
        "from pathlib import Path\n"
        "from gateway.config.load_object import load_object\n"
        f"near = Path({str(tools_file)!r})\n"
        "assert load_object('verl.tools.base_tool.BaseTool', near).theirs\n"
        "assert load_object('theirs.Mine', near).theirs\n"
        "import verl; assert 'lib' in verl.__file__\n"
        # Names that later releases removed are still offered.
        "assert load_object('verl.interactions.base.BaseInteraction', near).__module__ == 'mtrl_plugins.verl.base'\n"
    )
    root, lib = str(Path(__file__).parents[4]), str(tools_file.parents[1] / "lib")
    text = f"import sys; sys.path[:0] = [{lib!r}, {root!r}]\n{text}"
    completed = subprocess.run([sys.executable, "-c", text], timeout=60, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr


def test_a_clone_in_the_working_directory_is_not_an_installed_verl(write: Write) -> None:
    write("verl/__init__.py", "from verl.protocol import DataProto")
    write("verl/protocol.py", "import a_package_that_is_not_installed")
    write("verl/tools/__init__.py", "")
    write("verl/tools/base_tool.py", "import a_package_that_is_not_installed")
    write("verl/tools/mine.py", "from verl.tools.base_tool import BaseTool\nclass Mine(BaseTool): ...")
    write("conf/theirs.py", "from verl.tools.base_tool import BaseTool\nclass Theirs(BaseTool): ...")
    tools_file = write("conf/tools.yaml", "")
    assert load_object("theirs.Theirs", tools_file).__base__.__module__ == "mtrl_plugins.verl.base"
    assert load_object("verl.tools.mine.Mine", tools_file).__base__.__module__ == "mtrl_plugins.verl.base", (
        "a user's file in the clone"
    )
    with pytest.raises(ConfigError, match=r"there is no module 'verl\.tools\.search_tool'"):
        load_object("verl.tools.search_tool.SearchTool", tools_file)


TOOL = """
    from verl.utils.reward_score import geo3k
    from verl.utils.rollout_trace import rollout_trace_op

    from .base_tool import BaseTool
    from .schemas import OpenAIFunctionToolSchema, ToolResponse
    from .neighbour import FACTOR

    class MyTool(BaseTool):
        def __init__(self, config, tool_schema=None):
            self.tool_schema = OpenAIFunctionToolSchema.model_validate(
                {"type": "function", "function": {"name": "mine"}})
            super().__init__(config, tool_schema)

        @rollout_trace_op
        async def execute(self, instance_id, parameters, **kwargs):
            from .neighbour import LATER
            score = geo3k.compute_score("3", "3", use_boxed=False, format_score=0.0)
            return ToolResponse(text=str(score)), FACTOR, LATER
"""


async def test_copied_tool_imports_its_neighbours_and_verls_modules_relatively(write: Write) -> None:
    write("neighbour.py", "FACTOR = 0.5\nLATER = {'calls': 1}")
    file = write("my_tool.py", TOOL)
    tool = load_object("my_tool.MyTool", file.with_name("tools.yaml"), "tools[0]")({})
    assert isinstance(tool, BaseTool) and tool.name == "mine"
    response, reward, metrics = await tool.execute("i", {})
    assert (response.text, reward, metrics) == ("1.0", 0.5, {"calls": 1})


def test_missing_neighbour_is_reported_by_line(write: Write) -> None:
    file = write("my_lonely_tool.py", "from .base_tool import BaseTool\nfrom .nowhere import x")
    with pytest.raises(ConfigError, match=r"No module named '.*nowhere' \(.*my_lonely_tool\.py:2\)"):
        load_object("my_lonely_tool.MyTool", file.with_name("tools.yaml"), "tools[0]")


def test_subclass_of_verls_mcp_tool_keeps_state_by_instance() -> None:
    assert load_object("verl.tools.mcp_base_tool.MCPBaseTool")({}, None)._instance_dict == {}
