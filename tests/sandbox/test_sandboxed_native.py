"""Functions and classes with `isolation: sandbox` do what they do elsewhere, and what they give is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.conftest import Write
from tests.sandbox.conftest import kill_sandbox

CODE = """
    import os
    from gateway.errors import Unavailable
    from gateway.native.base import BaseTool, ToolResponse
    from gateway.native.function import SessionContext

    def reads(path: str) -> str:
        return open(path).read()

    async def waits() -> dict:
        import anyio
        await anyio.sleep(0.01)
        return {"waited": True}

    def scores_itself() -> tuple:
        return "well done", 1.0

    def claims_to_be_down() -> str:
        raise Unavailable("nobody can score this")

    def ends() -> str:
        os._exit(0)

    def in_context(context: SessionContext) -> str:
        return ""

    class Counter(BaseTool):
        async def create(self, instance_id=None, start=0, **kwargs):
            self.count = start
            return instance_id, ToolResponse(text="began")

        async def execute(self, instance_id, parameters, **kwargs):
            self.count += parameters["by"]
            return ToolResponse(text=str(self.count)), 1.0, {"count": self.count}

    class Judge(Counter):
        async def calc_reward(self, instance_id, **kwargs):
            return 1.0
"""
NAMES = ("reads", "waits", "scores_itself", "claims_to_be_down", "ends")
SCHEMA = "tool_schema: {function: {name: counter, parameters: {type: object, properties: {by: {type: integer}}}}}"


@pytest.fixture
def tools(write: Write) -> Path:
    write("boxed_tools.py", CODE)
    entries = [f"{{function: 'boxed_tools:{name}', isolation: sandbox}}" for name in NAMES]
    entries.append(f"{{class_name: boxed_tools.Counter, isolation: sandbox, {SCHEMA}}}")
    return write("tools.yaml", "tools:\n" + "".join(f"  - {entry}\n" for entry in entries))


async def test_function_whose_sandbox_is_ended_from_outside_is_no_error_of_the_policy(tools: Path) -> None:
    async with Gateway.load(tools, None) as gateway, gateway.open(Task()) as session:
        assert (await session.calls([ToolCall("1", "waits", "{}")]))[0].outcome is Outcome.OK
        kill_sandbox("the first process")
        after = (await session.calls([ToolCall("2", "waits", "{}")]))[0]
        assert after.outcome is Outcome.UNKNOWN and "from outside, by signal 9" in str(after.reason), after


async def test_functions_and_classes_run_in_sandboxes_of_the_rollout(tools: Path) -> None:
    task = Task(create={"counter": {"create_kwargs": {"start": 40}}})
    async with Gateway.load(tools, None) as gateway, gateway.open(task) as session:

        async def call(name: str, **arguments: Any) -> ToolResult:
            return (await session.calls([ToolCall("1", name, json.dumps(arguments))]))[0]

        source = tools.parent / "boxed_tools.py"
        assert "def reads" in (await call("reads", path=str(source))).text
        hidden = await call("reads", path=str(tools))
        assert hidden.outcome is Outcome.ERROR and "FileNotFoundError" in str(hidden.reason)
        assert (await call("waits")).structured == {"waited": True}
        assert (await call("reads", path=3)).outcome is Outcome.INVALID
        scored = await call("scores_itself")
        assert (scored.text, scored.reward) == ('["well done", 1.0]', None)
        assert (await call("claims_to_be_down")).outcome is Outcome.ERROR
        ended = await call("ends")
        assert ended.outcome is Outcome.ERROR and "its processes ended it" in str(ended.reason)
        first, second = await call("counter", by=1), await call("counter", by=1)
        assert (first.text, second.text) == ("began\n41", "42")
        assert first.reward is None and second.metrics["count"] == 42


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{function: 'boxed_tools:in_context', isolation: sandbox}", "the rollout's context"),
        (f"{{class_name: boxed_tools.Judge, isolation: sandbox, {SCHEMA}}}", "within reach of what it scores"),
        ("{function: 'boxed_tools:waits', sandbox: {memory_mb: 64}}", "`sandbox` belongs to `isolation: sandbox`"),
    ],
)
def test_what_cannot_be_sandboxed_is_refused(tools: Path, write: Write, entry: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Gateway.load(write("other.yaml", f"tools: [{entry}]"), None)
