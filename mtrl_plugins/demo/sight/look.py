"""The native tool `look`, which returns an image of a house."""

from __future__ import annotations

from typing import Any

from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from mtrl_plugins.demo.sight.house import draw_outside

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
    """Shows a house from outside. `config.show` may be `nothing` or `neighbour`, as a control experiment."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._show = config.get("show", "house")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(image=[draw_outside(parameters["house"], self._show)]), 0.0, {}
