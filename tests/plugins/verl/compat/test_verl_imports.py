"""Tests of imports of verl in users' files: stand-ins where verl is not installed, verl's own classes where it is."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from gateway.build import build_plan
from gateway.check import run_checks
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


SERVER = """
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("search")

@server.tool()
def search(query: str) -> str:
    if query == "nothing":
        raise ToolError("no index is loaded")
    return '{"query": "gnu", "results": [{"title": "A"}, {"title": "B"}], "took": 3}'

server.run("stdio")
"""
USED_TOOLS = """
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, rate_limit: 120, timeout: 20}
    mcp: {mcp_servers_config_path: ./servers.json}
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
interaction: {class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}
"""


def _write_files(write: Write) -> None:
    write("search_server.py", SERVER)
    server = {"command": sys.executable, "args": ["search_server.py"], "cwd": ".", "autoApprove": ["search"]}
    write("servers.json", json.dumps({"mcpServers": {"search": server}}))
    write("tools.yaml", USED_TOOLS)


async def test_check_tells_stand_ins_and_keys_of_other_clients(write: Write) -> None:
    _write_files(write)
    with anyio.fail_after(60):
        findings = await run_checks(build_plan("tools.yaml", None))
    messages = [finding.text for finding in findings if finding.grade == "ok"]
    for name in ("mcp_search_tool.MCPSearchTool", "gsm8k_tool.Gsm8kTool"):
        assert (
            f"verl.tools.{name}: mtrl's own class in its place, with the same results (verl is not installed)"
            in messages
        )
    assert any(message.startswith("verl.interactions.gsm8k_interaction.Gsm8kInteraction: ") for message in messages)
    (note,) = [finding.text for finding in findings if finding.grade == "note"]
    assert note == (
        "servers.json:1: mcpServers.search.autoApprove: `autoApprove` is ignored: nothing asks for confirmation here"
    )


PROGRAM = """
import sys, threading
from gateway.errors import ConfigError
from verl.tools.schemas import ToolResponse

def work():
    threading.main_thread().join(2)
    print("written")

threading.Thread(target=work).start()
if sys.argv[1] == "raise":
    raise ConfigError("theirs", field="x")
sys.exit(3)
"""


@pytest.mark.parametrize(("way", "code"), [("exit", 3), ("raise", 1)])
def test_a_program_keeps_its_threads_its_code_and_its_tracebacks(way: str, code: int, write: Write) -> None:
    words = [sys.executable, "-m", "trainer.cli", "run", str(write("program.py", PROGRAM)), way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "written\n"), done.stderr
    assert ("Traceback" in done.stderr) is (way == "raise")


PEERS = Path(__file__).parents[4] / ".peers"
ASYNC = """
import asyncio, inspect, pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "asyncio: a coroutine")

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True
"""


def test_verls_tests_of_its_interaction_pass_with_the_command_run(tmp_path: Path) -> None:
    shutil.copy(PEERS / "tests" / "interactions" / "test_gsm8k_interaction.py", tmp_path)
    (tmp_path / "conftest.py").write_text(ASYNC)
    words = ["run", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found := re.search(r"(\d+) passed", done.stdout)) and int(found[1]) >= 13, done.stdout


def test_a_program_gets_its_arguments_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    code = "import sys, helper\nfrom verl.interactions.base import BaseInteraction\n"
    (tmp_path / "program.py").write_text(code + "print(sys.argv[1:], BaseInteraction.__name__)\n")
    (tmp_path / "helper.py").write_text("from verl.tools.base_tool import BaseTool\n")
    words = [sys.executable, "-m", "trainer.cli", "run"]
    done = subprocess.run(
        [*words, "program.py", "--steps", "3"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "['--steps', '3'] BaseInteraction\n", done.stderr
    done = subprocess.run([*words, "none.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "none.py: there is no such file" in done.stderr
