"""Tests of files copied out of verl and put beside the configuration: relative imports."""

from __future__ import annotations

import pytest

from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from mtrl_plugins.verl.base import BaseTool
from tests.conftest import Write

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
