"""Writes tools, calls and results as text, in Hermes' format, for templates that know no tools (`calls: text`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTION = (
    'Write each call as JSON, {"name": ..., "arguments": {...}}, between <tool_call> and </tool_call>,'
    " and end your turn after the last one."
)


def write_calls_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages without tool calls and results: calls become text of the assistant, results messages of a user.

    The tools follow the system prompt, or precede the first message, since not every template has system prompts.
    """
    turns: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        turn, is_result = _rewrite(message), message["role"] == "tool"
        if is_result and follows_result:
            turns[-1] = {**turns[-1], "content": _join(turns[-1]["content"], "\n", turn["content"])}
        else:
            turns.append(turn)
        follows_result = is_result
    if tools and turns:
        lines = ["You may call these functions:", "<tools>", *map(_dump, tools), "</tools>", _INSTRUCTION]
        content, text = turns[0]["content"], "\n".join(lines)
        joined = _join(content, "\n\n", text) if turns[0]["role"] == "system" else _join(text, "\n\n", content)
        turns[0] = {**turns[0], "content": joined}
    return turns


def _rewrite(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message; a result becomes a message of a user."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": _join("<tool_response>\n", content, "\n</tool_response>")}
    turn = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
    if calls := message.get("tool_calls"):
        text = "\n".join(f"<tool_call>\n{_format_call(call['function'])}\n</tool_call>" for call in calls)
        turn["content"] = _join(content, "\n", text) if content else text
    return turn


def _format_call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else _dump(arguments)
    return f'{{"name": {_dump(function["name"])}, "arguments": {text}}}'


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _join(*contents: Any) -> Any:
    """Contents one after the other: text if all are text, and otherwise parts, with adjacent texts in one."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in as_parts(content):
            if parts and parts[-1].get("type") == part.get("type") == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
    return parts


def as_parts(content: Any) -> Any:
    """Content as a list of parts, which some templates of vision models take only."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
