"""Doors of the gateway: places where it calls user code, which `doors.py` lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.config.models import Limits
from gateway.errors import SessionError
from gateway.feedback.base import BaseInteraction
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_session import ResultParsers
from gateway.mcp_client.parse_hook import MCPBaseTool
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.class_environment import ClassEnvironment, ClassEnvironmentToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import ClassTool, NativeTool, NativeToolset
from gateway.types import Task, ToolCall, ToolResult, ToolSpec


@dataclass
class Patience:
    """The deadline of every door that has one."""

    s: float = 60.0
    """Long, so that it ends nothing that should simply work; short where a test waits for it."""


PATIENCE = Patience()
Act = Callable[[], Any]


async def settle(value: Any) -> Any:
    """What async code does with what it gets from an act: it awaits it, if it can."""
    return await value if inspect.iscoroutine(value) else value


async def call_tools(tools: Sequence[NativeTool], name: str, arguments: str = "{}") -> str:
    """Opens a session, calls a tool, and closes the session; returns what the policy reads."""
    toolset = LimitedToolset(NativeToolset(tools), Limits(timeout_s=PATIENCE.s))
    async with toolset, toolset.open(Task("t")) as session:
        result = await session.call(ToolCall("1", name, arguments))
        await session.finish()
    return "ok" if result.text == "fine" else f"{result.outcome}: {result.text} {result.reason}"


async def call_function_tool(act: Act) -> str:
    def tool() -> Any:
        """Acts."""
        return act()

    return await call_tools([FunctionTool(tool)], "tool")


async def call_async_tool(act: Act) -> str:
    async def tool() -> Any:
        """Acts."""
        return await settle(act())

    return await call_tools([FunctionTool(tool)], "tool")


class ActingTool(BaseTool):
    """A tool class of which one method acts, and the others do what they should."""

    def __init__(self, method: str, act: Act) -> None:
        schema = {"function": {"name": "tool", "parameters": {"type": "object", "properties": {}}}}
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.method, self.act = method, act

    def _answer(self, method: str, value: Any) -> Any:
        return value if method != self.method else self.act()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return await settle(self._answer("create", (instance_id, ToolResponse())))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await settle(self._answer("execute", "fine"))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await settle(self._answer("calc_reward", 0.5))

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        return await settle(self._answer("release", None))


async def call_class_tool(method: str, act: Act) -> str:
    try:
        return await call_tools([ClassTool(ActingTool(method, act))], "tool")
    except Exception as error:
        return str(error)


async def call_class_environment(method: str, act: Act) -> str:
    """Plays an episode of an environment class of which one method acts."""

    class World:
        def reset(self, **row: Any) -> Any:
            value = act() if method == "reset" else None
            return None if value == "fine" else value

        def look(self) -> Any:
            """Looks."""
            return act() if method == "look" else "fine"

        async def listen(self) -> Any:
            """Listens."""
            return await settle(act()) if method == "listen" else "fine"

        def get_reward(self) -> Any:
            return act() if method == "get_reward" else 1.0

    toolset = LimitedToolset(ClassEnvironmentToolset(ClassEnvironment(World, {})), Limits(timeout_s=PATIENCE.s))
    try:
        async with toolset, toolset.open(Task("t")) as session:
            result = await session.call(ToolCall("1", "listen" if method == "listen" else "look"))
            await session.finish()
    except SessionError as error:
        return str(error)
    return "ok" if result.text == "fine" else f"{result.outcome}: {result.text} {result.reason}"


class ActingInteraction(BaseInteraction):
    """An interaction of which one method acts."""

    method, act, is_async = "", staticmethod(lambda: None), False

    def _answer(self, method: str, value: Any) -> Any:
        return value if method != self.method else self.act()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return await settle(self._answer("start", instance_id))

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        good = (True, "fine", 1.0, {})
        value = await settle(self._answer("turn", good))
        return good if isinstance(value, str) else value

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await settle(self._answer("finalize", None))


async def take_feedback(method: str, act: Act) -> str:
    interaction = ActingInteraction({"name": "it"})
    interaction.method, interaction.act = method, staticmethod(act)  # type: ignore[assignment]
    toolset = FeedbackToolset({"it": interaction}, timeouts_s={"it": PATIENCE.s})
    try:
        async with toolset, toolset.open(Task("t", feedback="it")) as session:
            feedback = await session.feedback([{"role": "user", "content": "x"}])
    except Exception as error:
        return str(error)
    return "ok" if feedback.message == "fine" else f"{feedback.outcome} {feedback.message} {feedback.reason}"


async def parse_result(act: Act) -> str:
    class Hook(MCPBaseTool):
        def parse_result(self, result: ToolResult) -> Any:
            value = act()
            return result if value == "fine" else value

    parsers = ResultParsers({"*": Hook})
    result = await parsers.parse(ToolSpec("t"), {"content": [{"type": "text", "text": "fine"}]})
    assert result.text == "fine", "the policy gets the tool's answer, whatever the hook does"
    return result.reason or "ok"
