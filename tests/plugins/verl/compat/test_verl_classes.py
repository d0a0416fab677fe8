"""Tests that classes and files written for verl 0.7.1 and earlier work: signatures, replies, errors and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.types import Outcome, Task, ToolCall
from tests.conftest import Write

CHAT = ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "#### 4"})

INTERACTIONS = """
interaction:
  - class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
  - class_name: theirs.CoachInteraction
    config: {patience: 3}
  - class_name: theirs.Plain
  - name: "code_verifier"
    class_name: "verl.interactions.base.BaseInteraction"
    config: {verification_mode: strict}
"""

INTERACTION_CLASSES = """
from verl.interactions.base import BaseInteraction

class CoachInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.over = []

    async def start_interaction(self, instance_id=None, name=None, **kwargs):
        self.asked = name
        return await super().start_interaction(instance_id, **kwargs)

    async def generate_response(self, instance_id, messages, **kwargs):
        from verl.utils.reward_score import gsm8k
        score = gsm8k.compute_score(messages[-1]["content"], kwargs["ground_truth"])
        return score == 1.0, f"{self.asked}: {self.config['patience']}", score, {"seen": len(messages)}

    async def calculate_score(self):
        return await super().calculate_score()

    async def finalize_interaction(self):
        await super().finalize_interaction()
        self.over.append(True)

class Plain(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "Go on.", None, {}

    async def calculate_score(self):
        return 0.25
"""


def write_files(write: Write, **files: str) -> Path:
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        write(f"conf/{stem}.{suffix}", text)
    return Path("conf").resolve()


async def get_feedback(folder: Path, name: str | None, **args: Any) -> Any:
    async with Gateway.load(folder, None) as gateway, gateway.open(Task(feedback=name, feedback_args=args)) as session:
        return await session.feedback(CHAT)


async def test_finalize_interaction_without_an_id_is_called(write: Write) -> None:
    folder = write_files(write, all_yaml=INTERACTIONS, theirs_py=INTERACTION_CLASSES)
    with anyio.fail_after(60):
        async with Gateway.load(folder, None) as gateway:
            async with gateway.open(Task(feedback="coach", feedback_args={"ground_truth": "4"})) as session:
                await session.feedback(CHAT)
            (source,) = gateway.sources
            toolset: Any = source.toolset
            assert toolset.interactions["coach"].over == [True]
            assert toolset.counts["coach", "finalize_failed"] == 0


def test_the_registry_derives_names_as_verl_does(write: Write) -> None:
    write_files(write, all_yaml=INTERACTIONS, theirs_py=INTERACTION_CLASSES)
    interactions = load_object("verl.interactions.utils.interaction_registry:initialize_interactions_from_config")(
        "conf/all.yaml"
    )
    assert [*interactions] == ["gsm8k", "coach", "plain", "code_verifier"]
    assert {name: interaction.name for name, interaction in interactions.items()} == {
        name: name for name in interactions
    }
    assert interactions["code_verifier"].config == {"verification_mode": "strict", "name": "code_verifier"}


def test_the_registry_raises_the_same_errors_as_verl(write: Write) -> None:
    initialize = load_object("verl.interactions.utils.interaction_registry:initialize_interactions_from_config")
    duplicates = "interaction: [{class_name: theirs.Plain}, {class_name: theirs.Plain}]"
    write_files(write, two_yaml=duplicates, theirs_py=INTERACTION_CLASSES)
    with pytest.raises(ValueError, match="'plain'"):
        initialize("conf/two.yaml")
    with pytest.raises(FileNotFoundError):
        initialize("conf/none.yaml")
    get_class = load_object("verl.interactions.utils.interaction_registry:get_interaction_class")
    with pytest.raises(ImportError, match="no module 'nowhere'"):
        get_class("nowhere.Class")


TOOLS = """
tools:
  - class_name: theirs.Newer
    config: {type: native}
    tool_schema: {type: function, function: {name: newer, description: d, parameters: {type: object, properties: {}}}}
  - class_name: theirs.Older
    config: {type: native}
"""

TOOL_CLASSES = """
from typing import Any, Optional
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionParametersSchema, OpenAIFunctionPropertySchema, OpenAIFunctionSchema, OpenAIFunctionToolSchema,
    ToolResponse,
)
from verl.utils.rollout_trace import rollout_trace_op

class Newer(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.given = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id, **kwargs)
        self.given[instance_id] = kwargs.get("create_kwargs", {}).get("ground_truth")
        return instance_id, response

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text=f"{self.given[instance_id]} {kwargs.get('unit', '')}"), 0.5, {"n": 1}

    async def calc_reward(self, instance_id: str, weight: float = 1.0, **kwargs) -> float:
        return weight

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.given[instance_id]

class Older(BaseTool):
    def get_openai_tool_schema(self):
        answer = OpenAIFunctionPropertySchema(type="string", description="the answer", enum=["a", "b"])
        parameters = OpenAIFunctionParametersSchema(type="object", properties={"answer": answer}, required=["answer"])
        function = OpenAIFunctionSchema(name="older", description="d", parameters=parameters)
        return OpenAIFunctionToolSchema(type="function", function=function)

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs) -> str:
        self.truth = ground_truth
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        kind = self.tool_schema.function.parameters.properties["answer"].type
        return f"{parameters['answer']} of {self.truth} is a {kind}", -0.05, {}
"""


async def test_tools_of_both_interface_versions_work(write: Write) -> None:
    folder = write_files(write, all_yaml=TOOLS, theirs_py=TOOL_CLASSES)
    nested = {
        "create_kwargs": {"ground_truth": "42"},
        "execute_kwargs": {"unit": "km"},
        "calc_reward_kwargs": {"weight": 3.0},
    }
    task = Task(create={"newer": nested, "older": {"ground_truth": "7"}})
    with anyio.fail_after(60):
        async with Gateway.load(folder, None) as gateway, gateway.open(task) as session:
            newer = await session.call(ToolCall("1", "newer", "{}"))
            assert (newer.text, newer.reward, dict(newer.metrics)["n"]) == ("42 km", 0.5, 1)
            older = await session.call(ToolCall("1", "older", '{"answer": "b"}'))
            assert (older.text, older.reward) == ("b of 7 is a string", -0.05)
            assert (await session.call(ToolCall("1", "older", '{"answer": "c"}'))).outcome is Outcome.INVALID
            assert (await session.finish())["newer"] == 3.0


def test_the_registry_builds_native_tools(write: Write) -> None:
    write_files(write, all_yaml=TOOLS, theirs_py=TOOL_CLASSES)
    tools = load_object("verl.tools.utils.tool_registry:initialize_tools_from_config")("conf/all.yaml")
    assert [tool.name for tool in tools] == ["newer", "older"]
    dumped = tools[1].tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    assert dumped["function"]["parameters"]["properties"]["answer"]["enum"] == ["a", "b"]


def test_response_with_one_image_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match="list"):
        load_object("verl.tools.schemas.ToolResponse")(image="one.png")


MCP = """
tools:
  - class_name: theirs.MCPYourTool
    config: {type: mcp, rate_limit: 100, timeout: 7}
    mcp: {mcp_servers_config_path: ./mcp_server.json}
"""
SERVER = '{"mcpServers": {"SSE Server": {"url": "http://127.0.0.1:9/sse", "auth_token": "t"}}}'


def test_an_mcp_tool_class_with_execute_is_refused(write: Write) -> None:
    theirs = """
    from verl.tools.mcp_base_tool import MCPBaseTool
    class MCPYourTool(MCPBaseTool):
        async def execute(self, instance_id, parameters, **kwargs): ...
    """
    folder = write_files(write, all_yaml=MCP, theirs_py=theirs, mcp_server_json=SERVER)
    with pytest.raises(ConfigError, match=r"defines execute, which are never called.*\n.*_parse_tool_result"):
        Gateway.load(folder, None)


async def test_an_error_in_a_turn_is_reported_with_file_and_line(write: Write) -> None:
    theirs = INTERACTION_CLASSES.replace('kwargs["ground_truth"]', 'kwargs["truth"]')
    folder = write_files(write, all_yaml=INTERACTIONS, theirs_py=theirs)
    with anyio.fail_after(60):
        feedback = await get_feedback(folder, "coach", ground_truth="4")
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert feedback.reason == f"KeyError: 'truth' ({folder / 'theirs.py'}:15)"


async def test_a_tools_exception_is_reported_to_the_operator_with_file_and_line(write: Write) -> None:
    theirs = TOOL_CLASSES.replace("parameters['answer']", "parameters['anwser']")
    folder = write_files(write, all_yaml=TOOLS, theirs_py=theirs)
    with anyio.fail_after(60):
        async with Gateway.load(folder, None) as gateway, gateway.open() as session:
            result = await session.call(ToolCall("1", "older", '{"answer": "b"}'))
    assert result.text == "Error: KeyError: 'anwser'", "the policy does not get the line"
    assert f"{folder / 'theirs.py'}:" in str(result.reason)


DATA_TOOLS = """
tools:
  - {class_name: theirs.Keeps, tool_schema: {type: function, function: {name: keeps}}}
  - {class_name: theirs.Finds, tool_schema: {type: function, function: {name: finds}}}
  - {class_name: theirs.Looks, tool_schema: {type: function, function: {name: looks}}}
  - {class_name: theirs.Early, tool_schema: {type: function, function: {name: early}}}
"""
DATA_CLASSES = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Keeps(BaseTool):
    async def execute(self, instance_id, parameters, agent_data, **kwargs):
        agent_data.extra_fields.setdefault("calls", []).append(self.name)
        agent_data.last = self.name
        return ToolResponse(text=agent_data.request_id), 0.0, {}

class Finds(BaseTool):
    def execute(self, instance_id, parameters, **kwargs):
        data = kwargs["agent_data"]
        return f"{data.request_id} {data.extra_fields} {data.last} {data.tools_kwargs} {data.interaction_kwargs}"

class Looks(BaseTool):
    async def execute(self, instance_id, parameters, agent_data):
        return agent_data.messages[0]["content"]

class Early(BaseTool):
    async def execute(self, instance_id, parameters):
        return "as until 0.6"
"""


@pytest.fixture
def data_folder(write: Write) -> Path:
    write("conf/tools.yaml", DATA_TOOLS)
    return write("conf/theirs.py", DATA_CLASSES).parent


async def call_tools(data_folder: Path, task: Task, *names: str) -> list[str]:
    """The answers of tools, called one after the other in one rollout."""
    with anyio.fail_after(60):
        async with Gateway.load(data_folder, None) as gateway, gateway.open(task) as session:
            return [(await session.call(ToolCall("1", name, "{}"))).text for name in names]


async def test_the_tools_of_a_rollout_share_agent_data(data_folder: Path) -> None:
    task = Task(create={"keeps": {"place": "here"}}, feedback_args={"query": "?"})
    first, second, third = await call_tools(data_folder, task, "keeps", "keeps", "finds")
    rows = {"keeps": {"create_kwargs": {"place": "here"}}}, {"query": "?"}
    assert first == second
    assert third == f"{first} {{'calls': ['keeps', 'keeps']}} keeps {rows[0]} {rows[1]}"
    assert await call_tools(data_folder, task, "keeps") != [first], "another rollout has its own"


async def test_a_class_without_the_parameter_is_called_without_it(data_folder: Path) -> None:
    assert await call_tools(data_folder, Task(), "early") == ["as until 0.6"]


async def test_an_unknown_attribute_is_refused_with_the_known_ones(data_folder: Path) -> None:
    with anyio.fail_after(60):
        async with Gateway.load(data_folder, None) as gateway, gateway.open() as session:
            result = await session.call(ToolCall("1", "looks", "{}"))
    assert "agent_data has no 'messages', as the gateway does not see the chat; it has request_id, " in result.text
    assert f"{data_folder / 'theirs.py'}:" in str(result.reason)
