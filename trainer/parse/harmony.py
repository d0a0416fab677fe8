"""The parser of Harmony, gpt-oss's format: a turn is several messages, each with a channel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.types import ToolCall
from trainer.parse.base import MAX_PROBLEMS, CallParser, Reply, check_name
from trainer.parse.json_scan import MalformedCall, find_object_end, skip_space

_MESSAGE = "<|message|>"
_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>")
_HEADER_START = re.compile(r"<\|(?:start|channel)\|>")
_CONTINUED_HEADER = re.compile(r"\s*+to=[^\s<]++\s*+<\|channel\|>")
"""A header whose beginning, up to the recipient, is part of the prompt."""
_HEADER = re.compile(
    r"(?:<\|start\|>)?+\s*+(?:assistant)?+\s*+(?:to=(?P<to>[^\s<]++))?+\s*+<\|channel\|>\s*+(?P<channel>[a-z]++)"
    r"(?:\s++to=(?P<to_after>[^\s<]++))?+\s*+(?:<\|constrain\|>)?+\s*+\w*+\s*+"
)


@dataclass(slots=True)
class _Turn:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[MalformedCall] = field(default_factory=list)


class Harmony(CallParser):
    """`analysis` is reasoning, `commentary` to a function is a call, and everything else is content.

    A message ends with its end token or with the text, as the last token of a turn may have been removed before; the
    end of a JSON object is known anyway.
    """

    name = "harmony"

    def parse(self, text: str) -> Reply:
        turn, index = _Turn(), 0
        if self.thinking_open:
            index = self._parse_body(turn, text, 0, "analysis", None)
        while index < len(text):
            index = self._parse_message(turn, text, index)
        content_pieces = turn.content if len(turn.content) == 1 else [piece.strip() for piece in turn.content]
        problems = tuple(self.format_problem(text, malformed) for malformed in turn.problems[:MAX_PROBLEMS])
        content, reasoning = ("\n".join(filter(None, pieces)) for pieces in (content_pieces, turn.reasoning))
        return Reply(content, reasoning, tuple(turn.calls), problems)

    def _parse_message(self, turn: _Turn, text: str, start: int) -> int:
        """Parses the message at `start`, and returns its end."""
        mark = text.find(_MESSAGE, start)
        if mark < 0:
            turn.content.append(text[start:])
            if "to=functions." in text[start:]:
                turn.problems.append(MalformedCall(f"{_MESSAGE} is missing", len(text)))
            return len(text)
        header_start = None if _CONTINUED_HEADER.match(text, start) else _HEADER_START.search(text, start, mark)
        begin = header_start.start() if header_start else start
        if text[start:begin].strip():
            turn.content.append(text[start:begin])
        header = _HEADER.fullmatch(text, begin, mark)
        body = mark + len(_MESSAGE)
        if header:
            return self._parse_body(turn, text, body, header["channel"], header["to"] or header["to_after"])
        turn.problems.append(MalformedCall("the header of a message cannot be read", begin))
        body_end, message_end = _find_end(text, body)
        turn.content.append(text[begin:body_end])
        return message_end

    def _parse_body(self, turn: _Turn, text: str, body: int, channel: str, to: str | None) -> int:
        is_call = channel == "commentary" and to is not None and to.startswith("functions.")
        if is_call and len(turn.problems) < MAX_PROBLEMS:
            try:
                return _parse_call(turn, text, body, (to or "").removeprefix("functions."))
            except MalformedCall as malformed:
                turn.problems.append(malformed)
        elif to is not None and not is_call:
            turn.problems.append(MalformedCall("a call goes to=functions.NAME, on the commentary channel", body))
        body_end, message_end = _find_end(text, body)
        if channel == "analysis":
            turn.reasoning.append(text[body:body_end].strip())
        else:
            turn.content.append(text[body:body_end])
        return message_end

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json{_MESSAGE}{call.arguments}<|call|>"
            for call in calls
        )


def _parse_call(turn: _Turn, text: str, body: int, name: str) -> int:
    begin = skip_space(text, body)
    end = find_object_end(text, begin)
    after = skip_space(text, end)
    closing = _MESSAGE_END.match(text, after)
    if closing is None and after < len(text):
        raise MalformedCall("<|call|> is missing", after)
    turn.calls.append(ToolCall("", check_name(name, body), text[begin:end]))
    return closing.end() if closing else after


def _find_end(text: str, body: int) -> tuple[int, int]:
    """The end of a message's body, and of the message."""
    closing = _MESSAGE_END.search(text, body)
    return (closing.start(), closing.end()) if closing else (len(text), len(text))
