"""The GSM8K reward (`compute_score`, `extract_solution`) and interaction: compares the final number of an answer.

Names and methods are those of verl's GSM8K reward. The whole text is searched, since the patterns take linear time, and
numbers are compared by value: `1,000.0` equals `1000`.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal
from uuid import uuid4

from gateway.feedback.base import BaseInteraction, Message, Turn, last_message_text

Method = Literal["strict", "flexible"]

_SIGN, _CURRENCY = "[-+\u2212]?", "[$\u20ac\u00a3\u00a5]?"
_NUMBER = f"{_SIGN}{_CURRENCY}{_SIGN}[0-9.,]+"
_STRICT = re.compile(f"#### ({_NUMBER})")
# A sign right after a digit or a bracket is an operator: the last number of `5-3` is 3.
_FLEXIBLE = re.compile(rf"(?:(?<![0-9.,)\]])({_NUMBER}))|([0-9.,]+)")
_REPLACED_CHARS = str.maketrans({",": None, "$": None, "\u20ac": None, "\u00a3": None, "\u00a5": None, "\u2212": "-"})


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The final number of a text, without separators; None if it has none.

    `strict` takes the last `#### n`, `flexible` the last number of the text.
    """
    if method == "strict":
        candidates = [match[1] for match in _STRICT.finditer(solution_str)][-1:]
    elif method == "flexible":
        candidates = [match[0] for match in _FLEXIBLE.finditer(solution_str)]
    else:
        raise ValueError(f"method is {method!r}; it is 'strict' or 'flexible'")
    normalized = (_normalize(candidate) for candidate in reversed(candidates))
    return next((text for text in normalized if parse_number(text) is not None), None)


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for another one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    truth = _normalize(str(ground_truth).strip())
    expected = parse_number(truth)
    is_right = answer == truth if expected is None else parse_number(answer) == expected
    return score if is_right else format_score


def parse_number(text: str) -> Decimal | None:
    """A finite number, or None."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _normalize(text: str) -> str:
    """Removes separators, currency signs, and the full stop of a sentence that ends with the number."""
    return text.translate(_REPLACED_CHARS).removesuffix(".")


RIGHT_REPLY = "Your response is correct!"
WRONG_REPLY = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Tells the policy whether its answer is right. `method` is `strict` (the default) or `flexible`.

    The answer is the last assistant message. With `role: user`, or if there is no assistant message, it is the last
    user message, read as verl's older version does: flexibly, with `#### ` before it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.method = config.get("method", "strict")
        self.role = config.get("role", "assistant")
        if self.method not in ("strict", "flexible"):
            raise ValueError(f"method is {self.method!r}; it is 'strict' or 'flexible'")
        if self.role not in ("assistant", "user"):
            raise ValueError(f"role is {self.role!r}; it is 'assistant' or 'user'")
        self._instances: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        if ground_truth is None:
            raise ValueError("gsm8k needs `ground_truth` in the session's feedback arguments")
        instance_id = instance_id or str(uuid4())
        truth = extract_solution(str(ground_truth)) or ground_truth  # The dataset has a solution that ends in `#### n`.
        self._instances[instance_id] = {"response": "", "ground_truth": truth, "method": self.method}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        instance = self._instances[instance_id]
        answer = last_message_text(messages, self.role)
        use_older_rule = self.role == "user" or answer is None
        if use_older_rule:
            answer = last_message_text(messages, "user") or ""
            answer = answer if answer.startswith("#### ") else f"#### {answer}"
        instance["response"], instance["method"] = answer, "flexible" if use_older_rule else self.method
        if await self.calculate_score(instance_id) == 1.0:
            return True, RIGHT_REPLY, 1.0, {}
        return False, WRONG_REPLY, 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        instance = self._instances[instance_id]
        return compute_score(instance["response"], instance["ground_truth"], method=instance["method"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)
