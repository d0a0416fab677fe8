"""The native tool `look_up`, over facts that differ from rollout to rollout, so the policy cannot memorise them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What is known of a person or a city: where one lives, or how many people live there.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "The person or the city"}},
            "required": ["name"],
        },
    },
}


class LookUp(BaseTool):
    """Looks up the facts that the rollout's `create` received."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._facts: dict[str, Mapping[str, str]] = {}

    async def create(
        self, instance_id: str | None = None, facts: Mapping[str, str] | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._facts[instance_id] = facts or kwargs.get("create_kwargs", {}).get("facts", {})
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        fact = self._facts[instance_id].get(str(parameters["name"]))
        return ToolResponse(text=fact or "unknown"), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._facts.pop(instance_id, None)
