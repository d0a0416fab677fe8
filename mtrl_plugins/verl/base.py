"""The base classes of verl 0.7, the `agent_data` that its tools receive, and its tracing decorator.

The classes are the gateway's, with the default replies of verl's own methods: a class may override nothing, and
`super()` calls work with and without an instance id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from gateway.feedback import base as feedback
from gateway.media import process
from gateway.native import base as native
from gateway.native.base import ToolResponse

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
