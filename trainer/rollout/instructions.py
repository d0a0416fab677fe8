"""Puts what MCP servers say about themselves before the policy's first message, where `instructions: system` is set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import ToolSpec

SYSTEM_ROLES = ("system", "developer")


def add_instructions(messages: Sequence[Mapping[str, Any]], specs: Sequence[ToolSpec]) -> Sequence[Mapping[str, Any]]:
    """The messages with the instructions of the offered tools' servers after the system prompt, or as one."""
    first = messages[0] if messages else None
    known = str(first["content"]) if first is not None and first["role"] in SYSTEM_ROLES else ""
    texts = dict.fromkeys(spec.instructions for spec in specs if spec.instructions and spec.instructions not in known)
    if not texts:
        return messages
    text = "\n\n".join(texts)
    if first is None or first["role"] not in SYSTEM_ROLES:
        return ({"role": "system", "content": text}, *messages)
    content = first["content"]
    joined = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return ({**first, "content": joined}, *messages[1:])


def find_offered(specs: Sequence[ToolSpec], tools: Sequence[Mapping[str, Any]]) -> Sequence[ToolSpec]:
    """The gateway's tools that an agent offers the policy; agents put the name of their MCP client before a tool's."""
    names = [str(tool["function"]["name"]) for tool in tools]
    return [spec for spec in specs if any(_is_name_of(name, spec.name) for name in names)]


def _is_name_of(offered: str, name: str) -> bool:
    return re.search(rf"(?:^|[^A-Za-z0-9]){re.escape(name)}$", offered) is not None
