"""`BaseTool`, its schema and its response: the interface of tools that are classes.

One object serves the whole gateway; each rollout has an instance of it, known by `instance_id`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


class AttributeDict(dict[str, Any]):
    """A dict whose keys can be read as attributes too, like the fields of a model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _to_attribute_dict(value: Any) -> Any:
    if isinstance(value, dict):
        return AttributeDict({key: _to_attribute_dict(item) for key, item in value.items()})
    return [_to_attribute_dict(item) for item in value] if isinstance(value, list) else value


def _dump_model(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value


class OpenAIFunctionSchema(BaseModel):
    """A function in OpenAI's format. `parameters` is any JSON Schema, as a dict or a model."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: Annotated[dict[str, Any], BeforeValidator(_dump_model), AfterValidator(_to_attribute_dict)] = (
        AttributeDict(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's format."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """A tool's answer: text, and images or videos as paths, bytes, data URIs, arrays or PIL images."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """A tool class: `create` is called once per rollout, then any number of `execute`, then always `release`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema of a class that defines its own; used if the configuration has none."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise TypeError(f"{type(self).__name__} has no tool_schema, and its configuration gives none")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Starts a rollout's instance; returns its id and text or media that precede the first result."""
        return str(uuid4()) if instance_id is None else instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Runs one call; returns the response, the reward of this call, and metrics."""
        raise NotImplementedError(f"{type(self).__name__} does not define `execute`")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the whole rollout, called at its end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Frees what `create` acquired."""
