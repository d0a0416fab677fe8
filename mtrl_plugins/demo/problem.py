"""A demo problem: a task with the tool calls that lead to its answer, and a way to guess instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from gateway.types import Image
from trainer.ledger import Message
from trainer.rollout.task import Task
from trainer.template.chat_template import build_call

Split = Literal["train", "held_out"]
Guess = Callable[[Random], str]
HELD_OUT_SHARE = 8
"""One in this many tasks, chosen by a digest of its content, is held out."""


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A call that the task needs, and its result."""

    tool: str
    arguments: Mapping[str, Any]
    result: str | Image


@dataclass(frozen=True, slots=True)
class Problem:
    """A task with its solution."""

    kind: str
    task: Task
    calls: tuple[ExpectedCall, ...]
    """The calls that lead to the answer, in order."""
    answer: str
    guess: Guess

    @property
    def turns(self) -> tuple[Message, ...]:
        """The turns of a perfect policy: each call, then the answer."""
        calls = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [build_call(f"call_{number}", call.tool, json.dumps(call.arguments))],
            }
            for number, call in enumerate(self.calls, 1)
        ]
        return (*calls, answer_message(self.answer))


def answer_message(answer: str) -> Message:
    """The turn that gives an answer."""
    return {"role": "assistant", "content": f"#### {answer}"}
