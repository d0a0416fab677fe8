"""ms-swift's schedulers that answer a first wrong answer with a tip."""

from __future__ import annotations

from typing import Any

from gateway.errors import ConfigError
from mtrl_plugins.swift.multi_turn_scheduler import MultiTurnScheduler
from mtrl_plugins.swift.orm import MathAccuracy
from mtrl_plugins.swift.protocol import ChatCompletionResponseChoice, RolloutInferRequest

THINKING_ENDS = ("<answer>", "</think>")
"""Texts that end the thinking of a turn."""


class _TipsScheduler(MultiTurnScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or MathAccuracy()

    def _is_correct(self, request: RolloutInferRequest, answer: str) -> bool:
        if "solution" not in request.data_dict:
            remedy = "add this column with the correct answers"
            raise ConfigError("the row has no such column", field="solution", remedy=remedy)
        return bool(self.acc_func([answer], [request.data_dict["solution"]])[0] == 1)


class MathTipsScheduler(_TipsScheduler):
    """Replaces the answer by a tip within the policy's turn, which continues."""

    tips_prompt = "Wait, that cannot be right. Let me look at it once more:"

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        answer = infer_request.messages[-1]["content"]
        if self.tips_prompt in answer or self._is_correct(infer_request, answer):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        last = infer_request.messages[-1]
        thinking = min((last["content"].partition(end)[0] for end in THINKING_ENDS), key=len)
        last["content"] = thinking + self.tips_prompt
        return {"infer_request": infer_request}


class ThinkingModelTipsScheduler(_TipsScheduler):
    """Gives the tip as a user turn, and removes the thinking of earlier turns."""

    tips_prompt = "That is not the right answer. Go through it again, step by step, and find the mistake."

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        *before, last = infer_request.messages
        if self.tips_prompt in before[-1]["content"] or self._is_correct(infer_request, last["content"]):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        for message in infer_request.messages:
            if message["role"] == "assistant":
                message["content"] = message["content"].rpartition("</think>")[2].strip()
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}
