"""The base classes of verl 0.7, the `agent_data` that its tools receive, and its tracing decorator.

The classes are the gateway's, with the default replies of verl's own methods: a class may override nothing, and
`super()` calls work with and without an instance id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from gateway.feedback import base as feedback
from gateway.mcp_client import parse_hook
from gateway.media import process
from gateway.native import base as native
from gateway.native.base import ToolResponse


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a function."""

    model_config = ConfigDict(extra="allow")

    type: str
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All parameters of a function."""

    model_config = ConfigDict(extra="allow")

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str]


class OpenAIFunctionParsedSchema(BaseModel):
    """A call with arguments as JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with parsed arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments are invalid: not a JSON object, and replaced by an empty one."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        is_invalid = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if is_invalid else arguments), is_invalid


class OpenAIFunctionToolCall(BaseModel):
    """A call with an id."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class MCPBaseTool(parse_hook.MCPBaseTool):
    """Parses answers as verl's class does; of its methods only `_parse_tool_result` can be overridden."""

    text_only = True

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        return " ".join(item.text for item in content if item.type == "text"), {}

    def complete_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics with those that verl makes of each answer; it takes an answer that was parsed as no error."""
        defaults = {"query_count": 0, "status": "unknown", "total_results": 0}
        return {**defaults, **metrics, "api_request_error": None}


_QUERY = re.compile(r'query"\s*:\s*"([^"]+)"')
_TITLE = re.compile(r'"title"\s*:')
_RESULTS = re.compile(r'"results"\s*:\s*(\[.*?\])', re.DOTALL)


class MCPSearchTool(MCPBaseTool):
    """Parses answers as verl's tool does: by patterns, so that single quotes and half a JSON document will do."""

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        texts = [item.text.replace("'", '"') for item in content if item.type == "text"]
        queries = [match[1] if (match := _QUERY.search(text)) else "" for text in texts]
        results = "".join(match[1] if (match := _RESULTS.search(text)) else "" for text in texts)
        metrics = {
            "api_request_error": "",
            "status": "success",
            "total_results": sum(len(_TITLE.findall(text)) for text in texts),
            "queries": queries,
            "query_count": len(queries),
        }
        return results, metrics


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
