"""Conversations for tests of templates, and a parser of tagged JSON that needs no family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from gateway.types import ToolCall
from tests.trainer.tokenizers_for_tests import Family, tokenizer_for
from trainer.ledger import Message
from trainer.parse.base import Reply
from trainer.template import Settings, Template
from trainer.template.chat import called

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


class Tags:
    """Reads `<think>` and JSON in `<tool_call>`, and believes what it reads."""

    name = "tags"

    def parse(self, text: str) -> Reply:
        thought, closed, said = text.rpartition("</think>")
        found = re.findall(
            r'<tool_call>\s*\{"name":\s*"(\w+)",\s*"arguments":\s*(.*?)\}\s*</tool_call>', said, re.DOTALL
        )
        made = tuple(ToolCall(f"call0000{i}", name, arguments) for i, (name, arguments) in enumerate(found))
        content = re.sub(r"<tool_call>.*?</tool_call>", "", said, flags=re.DOTALL).strip("\n")
        return Reply(content, thought.partition("<think>")[2] if closed else "", made)


@cache
def _tokenizer(family: Family) -> Any:
    return tokenizer_for(family)


def template_for(family: Family, settings: Settings | None = None, parser: Any = None) -> Template:
    """With the stops that the family's generation_config.json would name."""
    template = Template.load(_tokenizer(family), parser or Tags(), settings)
    if family.stops:
        ids = [template.tokens.control[token] for token in (family.eos, *family.stops)]
        template = Template(template.chat, template.parser, ids, template.settings)
    return template


def calls(*words: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call0000{i}", "look_up", json.dumps({"word": word})) for i, word in enumerate(words))


def asks(made: Sequence[ToolCall], content: str = "") -> Message:
    rows = [called(call.id, call.name, call.arguments) for call in made]
    return {"role": "assistant", "content": content, "tool_calls": rows}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def replies(made: Sequence[ToolCall], *texts: str) -> tuple[Message, ...]:
    return tuple(
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(made, texts, strict=True)
    )
