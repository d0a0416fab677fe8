"""Checks that a parser rejects a turn, and explains its format with an example that it reads."""

from __future__ import annotations

from trainer.parse.base import Parser


def check_rejected_turn(parser: Parser, text: str, reason: str) -> None:
    """The turn has no call, the first problem has the reason, and each shows how a call is written."""
    reply = parser.parse(text)
    assert reply.calls == ()
    assert reason in reply.problems[0]
    assert all("Write a call so:\n" in problem and len(problem) < 600 for problem in reply.problems)
    shown = reply.problems[0].partition("Write a call so:\n")[2]
    assert [(call.name, call.arguments) for call in parser.parse(shown).calls] == [("NAME", '{"KEY": "VALUE"}')]
