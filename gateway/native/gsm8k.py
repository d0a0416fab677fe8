"""verl's example tool: it checks an answer to a maths problem, and rewards only an improvement."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from gateway.feedback.score import compute_score
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Checks a final answer to the problem; the reward is 1.0 where it is right.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer, a number"}},
            "required": ["answer"],
        },
    },
}


class Gsm8kTool(BaseTool):
    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._instances: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        truth = ground_truth if ground_truth is not None else kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instances[instance_id] = {"response": "", "ground_truth": truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        instance = self._instances[instance_id]
        text = str(parameters.get("answer", ""))
        instance["response"] = text if text.startswith("#### ") else f"#### {text}"
        reward = await self.calc_reward(instance_id)
        # A second try must pay for itself, or the policy learns to ask again.
        step = 0.0 if reward > instance["reward"] else -0.05
        instance["reward"] = reward
        return ToolResponse(text=f"Current parsed answer={text!r} reward={reward}"), step, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        instance = self._instances[instance_id]
        return compute_score(instance["response"], str(instance["ground_truth"]), method="flexible", score=1.0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)
