"""Tools of an OpenEnv environment that is an MCP server inside: their list, and what a call answers."""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import Image, Part, Text
from mtrl_plugins.environments.episodes import MAX_PARTS, cut_text
from mtrl_plugins.environments.host_process import EnvironmentFailed

FAILURES = ("transport_error", "timeout")
"""Errors of a call that are the environment's failure."""
MISTAKES = ("invalid_args", "tool_not_found")
"""Errors of a call that are the policy's."""


class CallRefused(Exception):
    """The call did not fit a tool; the text is for the policy."""


def read_tools(listed: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    """The tools that an environment lists."""
    return [
        {
            "name": str(tool["name"]),
            "description": str(tool.get("description") or ""),
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        for tool in listed
        if isinstance(tool, Mapping) and tool.get("name")
    ]


def read_call(observation: Any, owner: str) -> tuple[Part, ...] | None:
    """What a tool answered; None if the observation is no answer of a tool. Raises CallRefused or EnvironmentFailed."""
    if not isinstance(observation, Mapping) or "tool_name" not in observation:
        return None
    error = observation.get("error")
    if isinstance(error, Mapping):
        kind, text = error.get("error_type"), str(error.get("message") or error.get("error_type"))
        if kind in FAILURES:
            raise EnvironmentFailed(f"{owner}: {text}")
        if kind in MISTAKES:
            raise CallRefused(text)
        return (Text(cut_text(f"Error: {text}")),)
    result = observation.get("result")
    content = result.get("content") if isinstance(result, Mapping) else None
    if isinstance(content, list):
        return tuple(_read_block(block, owner) for block in content[:MAX_PARTS])
    return (Text(cut_text(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))),)


def _read_block(block: Any, owner: str) -> Part:
    """A block of MCP content: a text, an image, or anything else as JSON."""
    if isinstance(block, Mapping) and block.get("type") == "text":
        return Text(cut_text(str(block.get("text", ""))))
    if isinstance(block, Mapping) and block.get("type") == "image":
        try:
            return Image(b64decode(block["data"], validate=True), str(block.get("mimeType") or "image/png"))
        except (KeyError, TypeError, binascii.Error) as error:
            raise EnvironmentFailed(f"{owner} sent an image that is not base64 ({error})") from error
    return Text(cut_text(json.dumps(block, ensure_ascii=False)))
