"""Demonstrations as ledgers, written as a policy would write them: whole, or with the habit of guessing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gateway.feedback.gsm8k import WRONG
from trainer.demo.task import Lookup, Problem, number, says
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
        """Each call is made with this probability; otherwise a number is guessed in its place, and that is the end.

        Where there is a second try, half of the demonstrations begin after a wrong first one, which is nobody's to
        learn from: the task wrote it.
        """
        messages = problem.task.messages
        if problem.task.has_feedback and draw.random() < 0.5:
            messages = (*messages, says(number(draw)), {"role": "user", "content": WRONG})
        ledger = Ledger((Entry(Author.TASK, self.template.open(messages, self.tools), messages),))
        for place, turn in enumerate(problem.turns):
            if place < len(problem.calls) and draw.random() >= right:
                return ledger + self._said(says(number(draw)))
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
        return Entry(Author.TOOL, self._tail(call.answer, id), source=call.tool)

    def _tail(self, answer: str, id: str) -> tuple[int, ...]:
        return self.template.tail([{"role": "tool", "tool_call_id": id, "content": answer}], ended=True)
