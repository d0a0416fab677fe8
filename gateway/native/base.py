"""A class is a tool: one object for the whole gateway, one instance of it for each rollout."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


class Fields(dict[str, Any]):
    """A mapping whose keys are attributes as well, as those of a model are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _fields(value: Any) -> Any:
    if isinstance(value, dict):
        return Fields({key: _fields(item) for key, item in value.items()})
    return [_fields(item) for item in value] if isinstance(value, list) else value


def _written_out(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value


class OpenAIFunctionSchema(BaseModel):
    """`parameters` may be anything that JSON Schema allows, written out or as a model."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: Annotated[dict[str, Any], BeforeValidator(_written_out), AfterValidator(_fields)] = Fields(
        type="object", properties={}
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool answers: text, and pictures or films as paths, bytes, data URIs, arrays or PIL pictures."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """`create` once and `release` always, with every `execute` of the rollout in between."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema, for a class that brings its own; otherwise the configuration gives it."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise TypeError(f"{type(self).__name__} has no tool_schema, and its configuration gives none")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} does not say what it does: define `execute`")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Gives back what `create` took."""
