"""Parsers of jobs without tools: `Plain` separates reasoning from content, `PlainText` takes a turn as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import EMPTY, ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, Reply
from trainer.parse.json_scan import MalformedCall


class Plain(MarkedParser):
    """Separates reasoning from content; whatever else the policy writes is content."""

    name = "plain"
    openers = ()

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        raise MalformedCall("this job has no tools", start)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return ""


class PlainText:
    """Takes every turn as it was written, reasoning included."""

    name = "plain_text"

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False) -> None:
        self.schemas, self.thinking_open = schemas, thinking_open

    def parse(self, text: str) -> Reply:
        return Reply(content=text)
