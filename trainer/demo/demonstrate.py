"""Demonstrations as ledgers, written as a policy would write them: whole, or with the habit of guessing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from gateway.content import content
from gateway.feedback.gsm8k import WRONG
from trainer.demo.problem import Lookup, Problem, says
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Template
from trainer.template.chat import Tool
from trainer.template.written import written

_BEFORE: Message = {"role": "user", "content": "?"}


@dataclass(frozen=True, eq=False)
class Writer:
    """Writes turns in the words of one template."""

    template: Template
    tools: Sequence[Tool]

    def demonstration(self, problem: Problem, draw: Random, right: float = 1.0) -> Ledger:
        """Each call is made with this probability; otherwise the answer is guessed in its place, and that is the end.

        Where there is a second try, half of the demonstrations begin after a wrong first one, which is nobody's to
        learn from: the task wrote it.
        """
        messages = problem.task.messages
        if problem.task.has_feedback and draw.random() < 0.5:
            messages = (*messages, says(problem.guess(draw)), {"role": "user", "content": WRONG})
        ledger = Ledger((Entry(Author.TASK, self.template.open(messages, self.tools), messages),))
        for place, turn in enumerate(problem.turns):
            if place < len(problem.calls) and draw.random() >= right:
                return ledger + self._said(says(problem.guess(draw)))
            ledger += self._said(turn)
            if place < len(problem.calls):
                ledger += self._answer(problem.calls[place], f"call_{place + 1}")
        return ledger

    def says(self, turn: Message) -> tuple[int, ...]:
        return written(self.template, (_BEFORE,), turn, self.tools)

    def _said(self, turn: Message) -> Entry:
        ids = self.says(turn)
        return Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop="stop")

    def _answer(self, call: Lookup, id: str) -> Entry:
        said: Any = call.answer if isinstance(call.answer, str) else content([call.answer])
        laid = self.template.lay([{"role": "tool", "tool_call_id": id, "content": said}])
        return self.template.placed(
            laid, Entry(Author.TOOL, self.template.tail(laid.messages, ended=True), source=call.tool)
        )
