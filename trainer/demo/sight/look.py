"""A native tool that answers with a picture: a house from outside."""

from __future__ import annotations

from typing import Any

from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from trainer.demo.sight.house import outside

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "A picture of a house from outside: one of its windows is lit.",
        "parameters": {
            "type": "object",
            "properties": {"house": {"type": "string", "description": "The house's name"}},
            "required": ["house"],
        },
    },
}


class Look(BaseTool):
    """`config.show` may be `nothing` or `neighbour`, to see whether an answer comes from what is shown."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._show = config.get("show", "house")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(image=[outside(parameters["house"], self._show)]), 0.0, {}
