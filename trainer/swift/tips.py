"""Schedulers that give a policy one more chance: a wrong answer is met with a tip, once."""

from __future__ import annotations

from typing import Any

from gateway.errors import ConfigError
from trainer.swift.orm import MathAccuracy
from trainer.swift.protocol import ChatCompletionResponseChoice, RolloutInferRequest
from trainer.swift.scheduler import MultiTurnScheduler

ENDS = ("<answer>", "</think>")
"""Where a turn stops thinking."""


class _TipsScheduler(MultiTurnScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or MathAccuracy()

    def _right(self, request: RolloutInferRequest, said: str) -> bool:
        if "solution" not in request.data_dict:
            remedy = "write the right answer into this column"
            raise ConfigError("the row has no such column", field="solution", remedy=remedy)
        return bool(self.acc_func([said], [request.data_dict["solution"]])[0] == 1)


class MathTipsScheduler(_TipsScheduler):
    """The tip stands within the turn, in the place of the answer."""

    tips_prompt = "Wait, that cannot be right. Let me look at it once more:"

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        said = infer_request.messages[-1]["content"]
        if self.tips_prompt in said or self._right(infer_request, said):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        last = infer_request.messages[-1]
        thought = min((last["content"].partition(end)[0] for end in ENDS), key=len)
        last["content"] = thought + self.tips_prompt
        return {"infer_request": infer_request}


class ThinkingModelTipsScheduler(_TipsScheduler):
    """The tip is a user's turn, before which nothing is left of what was thought."""

    tips_prompt = "That is not the right answer. Go through it again, step by step, and find the mistake."

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        *before, last = infer_request.messages
        if self.tips_prompt in before[-1]["content"] or self._right(infer_request, last["content"]):
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
