"""Conversations for tests of templates, and a parser of JSON in tags that does not depend on a family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from gateway.types import ToolCall
from tests.trainer.tokenizer_families import Family, make_tokenizer
from trainer.ledger import Message
from trainer.parse.base import Reply
from trainer.template import Settings, Template
from trainer.template.chat_template import build_call

TASK: tuple[Message, ...] = (
    {"role": "system", "content": "You answer."},
    {"role": "user", "content": "What is a gnu?"},
)
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class TagParser:
    """Parses `<think>` and JSON in `<tool_call>`, without any checks."""

    name = "tags"

    def parse(self, text: str) -> Reply:
        reasoning, closing, rest = text.rpartition("</think>")
        matches = re.findall(
            r'<tool_call>\s*\{"name":\s*"(\w+)",\s*"arguments":\s*(.*?)\}\s*</tool_call>', rest, re.DOTALL
        )
        calls = tuple(ToolCall(f"call0000{i}", name, arguments) for i, (name, arguments) in enumerate(matches))
        content = re.sub(r"<tool_call>.*?</tool_call>", "", rest, flags=re.DOTALL).strip("\n")
        return Reply(content, reasoning.partition("<think>")[2] if closing else "", calls)


@cache
def _tokenizer(family: Family) -> Any:
    return make_tokenizer(family)


def make_template(family: Family, settings: Settings | None = None, parser: Any = None) -> Template:
    """A template with the stop ids of the family's generation_config.json."""
    template = Template.load(_tokenizer(family), parser or TagParser(), settings)
    if family.stop_tokens:
        ids = [template.tokenizer.control_ids[token] for token in (family.eos, *family.stop_tokens)]
        template = Template(template.chat, template.parser, ids, template.settings)
    return template


def make_calls(*words: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call0000{i}", "look_up", json.dumps({"word": word})) for i, word in enumerate(words))


def calling_turn(calls: Sequence[ToolCall], content: str = "") -> Message:
    rows = [build_call(call.id, call.name, call.arguments) for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": rows}


def text_turn(content: str) -> Message:
    return {"role": "assistant", "content": content}


def tool_replies(calls: Sequence[ToolCall], *texts: str) -> tuple[Message, ...]:
    return tuple(
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(calls, texts, strict=True)
    )
