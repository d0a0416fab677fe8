"""verl's pydantic models of tool schemas and calls. Other keys of JSON Schema are kept."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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
