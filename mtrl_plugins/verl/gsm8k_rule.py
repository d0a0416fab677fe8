"""verl's GSM8K rule and the interaction and tool built on it, with the same scores as verl's own.

The rule reads the last 300 characters and compares texts: `1000.0` is not `1000`. Our own reward `answer` is built on
`gateway.feedback.gsm8k`, which reads the whole text and compares numbers.
"""

from __future__ import annotations

import re
import sys
from typing import Any
from uuid import uuid4

from gateway.feedback.base import last_message_text
from gateway.feedback.gsm8k import RIGHT_REPLY, WRONG_REPLY
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from mtrl_plugins.verl.base import BaseInteraction

TAIL_CHARS = 300
"""How much of the end of a text is read."""
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")
SCORER_MODULE = "verl.utils.reward_score.gsm8k"


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The last number as text: behind `#### ` if `strict`, anywhere if `flexible`; None if there is none."""
    if method not in ("strict", "flexible"):
        raise AssertionError(f"method is {method!r}; it is 'strict' or 'flexible'")
    tail = solution_str[-TAIL_CHARS:]
    if method == "strict":
        strict = _STRICT.findall(tail)
        return strict[-1].replace(",", "") if strict else None
    numbers = _FLEXIBLE.findall(tail)
    return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right text, `format_score` for another number, 0 for none.

    A ground truth that is a number is refused, since in verl no answer ever equals it.
    """
    if isinstance(ground_truth, int | float):
        raise TypeError(f"ground_truth is the number {ground_truth!r}; the rule compares texts: write '{ground_truth}'")
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score


def _call_compute_score(*args: Any, **kwargs: Any) -> float:
    """Calls the function by verl's name, so that a user's patch of that name has an effect."""
    scorer = sys.modules.get(SCORER_MODULE, sys.modules[__name__])
    score: float = scorer.compute_score(*args, **kwargs)
    return score


class Gsm8kInteraction(BaseInteraction):
    """verl's interaction: tells the policy whether its last message has the right number behind `#### `.

    With `role: user`, or in a chat without an assistant message (which no rollout has), it reads the last user message,
    as verl did until 0.5.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.role = config.get("role", "assistant")
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        state, answer = self._instance_dict[instance_id], last_message_text(messages, self.role)
        if answer is None or self.role == "user":
            number = extract_solution(last_message_text(messages, "user") or "", "flexible")
            answer = f"#### {number}" if number else ""
        is_silent = bool(messages) and messages[-1].get("role") == self.role and messages[-1].get("content") is None
        state["response"] = None if is_silent else answer
        score = await self.calculate_score(instance_id)
        return (True, RIGHT_REPLY, score, {}) if score == 1.0 else (False, WRONG_REPLY, score, {})

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return _call_compute_score(
            state["response"] or "", state["ground_truth"], method="strict", format_score=0.0, score=1.0
        )

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


DEFAULT_SCHEMA = {
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
    """verl's tool: checks an answer against the `ground_truth` of `create`; a call without improvement costs 0.05."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(DEFAULT_SCHEMA))
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = str(uuid4()) if instance_id is None else instance_id
        truth = ground_truth if ground_truth is not None else kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instance_dict[instance_id] = {"response": "", "ground_truth": truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        state = self._instance_dict[instance_id]
        text = str(parameters.get("answer", ""))
        state["response"] = text if text.startswith("#### ") else f"#### {text}"
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        return ToolResponse(text=f"Current parsed answer={text!r} reward={reward}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return _call_compute_score(
            state["response"], state["ground_truth"], method="flexible", format_score=0.0, score=1.0
        )

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]
