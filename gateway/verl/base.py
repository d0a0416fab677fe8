"""The base classes of verl 0.7, the `agent_data` that its tools receive, and its tracing decorator.

The classes are the gateway's, with the default replies of verl's own methods: a class may override nothing, and
`super()` calls work with and without an instance id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

from gateway.feedback import base as feedback
from gateway.media import process
from gateway.native import base as native
from gateway.native.base import ToolResponse
from gateway.types import Task

BASE_CLASS_MODULES = ("gateway.verl.base", "verl.tools.base_tool")
"""Modules of the base class of verl's tools: ours, or that of an installed verl."""
KWARGS_KEYS = frozenset({"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"})


class AgentData:
    """What the gateway knows of verl's state of a rollout. All calls of a rollout share one object."""

    def __init__(self, task: Task) -> None:
        name = {"name": task.feedback} if task.feedback else {}
        self.request_id = uuid4().hex
        self.extra_fields: dict[str, Any] = {}
        self.tools_kwargs = {tool: kwargs_by_method(row) for tool, row in task.create.items()}
        self.interaction_kwargs: dict[str, Any] = name | dict(task.feedback_args)

    def __getattr__(self, name: str) -> Any:
        available = ", ".join(vars(self))
        raise AttributeError(f"agent_data has no {name!r}, as the gateway does not see the chat; it has {available}")


def kwargs_by_method(row: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's keyword arguments in verl's form; rows in the gateway's form hold those of `create`."""
    return dict(row) if row.keys() & KWARGS_KEYS else {"create_kwargs": dict(row)}


def is_verl_tool(tool: object) -> bool:
    """Whether a tool's class was written for verl."""
    return any(base.__module__ in BASE_CLASS_MODULES for base in type(tool).__mro__)


DEFAULT_REPLY = "Your current result seems acceptable."
DEFAULT_SCORE = 0.8
DEFAULT_TOOL_TEXT = "Updated the tool state."


class BaseInteraction(feedback.BaseInteraction):
    """verl's base interaction: without overrides, every turn is acceptable."""

    async def generate_response(
        self, instance_id: str, messages: list[feedback.Message], **kwargs: Any
    ) -> feedback.Turn:
        return False, DEFAULT_REPLY, DEFAULT_SCORE, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """Does nothing."""


class BaseTool(native.BaseTool):
    """verl's base tool: without overrides, every call succeeds."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text=DEFAULT_TOOL_TEXT), 0.0, {}


def process_image(image: Any, image_patch_size: int = 14) -> Any:
    """A PIL image in RGB, as verl converts it: without its transparency and EXIF orientation. Mappings are resized."""
    if not isinstance(image, Mapping):
        return image.convert("RGB")
    return process.process_image(image, image_patch_size)


Function = TypeVar("Function", bound=Callable[..., Any])


def rollout_trace_op(func: Function) -> Function:
    """Returns the function unchanged: the gateway sees every call without it."""
    return func


@contextmanager
def rollout_trace_attr(**kwargs: Any) -> Iterator[None]:
    """Does nothing: the run's files hold these attributes."""
    yield
