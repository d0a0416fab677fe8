"""Harmony, of gpt-oss: a turn is several messages, and a message's channel says what it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.types import ToolCall

from .base import Reply
from .family import MAX_PROBLEMS, Family, named
from .written import Malformed, object_end, spaced

_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_BEGINS = re.compile(r"<\|(?:start|channel)\|>")
_FIRST = re.compile(r"\s*+to=[^\s<]++\s*+<\|channel\|>")
"""A header whose beginning, up to the recipient, the prompt wrote."""
_HEADER = re.compile(
    r"(?:<\|start\|>)?+\s*+(?:assistant)?+\s*+(?:to=(?P<to>[^\s<]++))?+\s*+<\|channel\|>\s*+(?P<channel>[a-z]++)"
    r"(?:\s++to=(?P<also>[^\s<]++))?+\s*+(?:<\|constrain\|>)?+\s*+\w*+\s*+"
)


@dataclass(slots=True)
class _Turn:
    said: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[Malformed] = field(default_factory=list)


class Harmony(Family):
    """`analysis` is reasoning, all of it; `commentary` to a function is a call; everything else is said.

    A message ends with its own token or with the text: what reads a turn may have taken its last token away, and a
    complete JSON object is known by itself.
    """

    name = "harmony"

    def parse(self, text: str) -> Reply:
        turn, at = _Turn(), 0
        if self.thinking_open:
            at = self._message(turn, text, 0, "analysis", None)
        while at < len(text):
            at = self._next(turn, text, at)
        said = turn.said if len(turn.said) == 1 else [piece.strip() for piece in turn.said]
        problems = tuple(self.problem(text, wrong) for wrong in turn.problems[:MAX_PROBLEMS])
        content, reasoning = ("\n".join(filter(None, pieces)) for pieces in (said, turn.reasoning))
        return Reply(content, reasoning, tuple(turn.calls), problems)

    def _next(self, turn: _Turn, text: str, at: int) -> int:
        """Over the message that begins at `at`."""
        mark = text.find(_MESSAGE, at)
        if mark < 0:
            turn.said.append(text[at:])
            if "to=functions." in text[at:]:
                turn.problems.append(Malformed(f"{_MESSAGE} is missing", len(text)))
            return len(text)
        begins = None if _FIRST.match(text, at) else _BEGINS.search(text, at, mark)
        begin = begins.start() if begins else at
        if text[at:begin].strip():
            turn.said.append(text[at:begin])
        header = _HEADER.fullmatch(text, begin, mark)
        body = mark + len(_MESSAGE)
        if header:
            return self._message(turn, text, body, header["channel"], header["to"] or header["also"])
        turn.problems.append(Malformed("the header of a message cannot be read", begin))
        end, after = _end(text, body)
        turn.said.append(text[begin:end])
        return after

    def _message(self, turn: _Turn, text: str, body: int, channel: str, to: str | None) -> int:
        called = channel == "commentary" and to is not None and to.startswith("functions.")
        if called and len(turn.problems) < MAX_PROBLEMS:
            try:
                return _call(turn, text, body, (to or "").removeprefix("functions."))
            except Malformed as wrong:
                turn.problems.append(wrong)
        elif to is not None and not called:
            turn.problems.append(Malformed("a call goes to=functions.NAME, on the commentary channel", body))
        end, after = _end(text, body)
        if channel == "analysis":
            turn.reasoning.append(text[body:end].strip())
        else:
            turn.said.append(text[body:end])
        return after

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json{_MESSAGE}{call.arguments}<|call|>"
            for call in calls
        )


def _call(turn: _Turn, text: str, body: int, name: str) -> int:
    begin = spaced(text, body)
    end = object_end(text, begin)
    after = spaced(text, end)
    closing = _ENDS.match(text, after)
    if closing is None and after < len(text):
        raise Malformed("<|call|> is missing", after)
    turn.calls.append(ToolCall("", named(name, body), text[begin:end]))
    return closing.end() if closing else after


def _end(text: str, body: int) -> tuple[int, int]:
    """Where a message's words end, and where the next message begins."""
    closing = _ENDS.search(text, body)
    return (closing.start(), closing.end()) if closing else (len(text), len(text))
