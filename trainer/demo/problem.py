"""A problem of a demo: a task, the calls that lead to its answer, and what a policy says that guesses instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from gateway.types import Image
from trainer.ledger import Message
from trainer.task import Task
from trainer.template.chat import called

Split = Literal["train", "held_out"]
Guess = Callable[[Random], str]
HELD_OUT = 8
"""One in so many tasks, told by a digest of what it is about, is never trained on."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A call that the task needs, and what it is answered."""

    tool: str
    arguments: Mapping[str, str]
    answer: str | Image


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    task: Task
    calls: tuple[Lookup, ...]
    """Those that lead to the answer, in order."""
    answer: str
    guess: Guess

    @property
    def turns(self) -> tuple[Message, ...]:
        """What a perfect policy says."""
        asked = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [called(f"call_{at}", one.tool, json.dumps(one.arguments))],
            }
            for at, one in enumerate(self.calls, 1)
        ]
        return (*asked, says(self.answer))


def says(answer: str) -> Message:
    return {"role": "assistant", "content": f"#### {answer}"}
