"""What a tool's answer means is for its user to say: derive a class, and override one of two readings.

Needs no MCP package, so that such a class can live anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.types import Text, ToolResult


class Content:
    """One content object of a result, with its fields under their wire names and under Python's."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        for name, value in self._fields.items():
            held = Content(value) if isinstance(value, Mapping) else value
            setattr(self, name, held)
            setattr(self, _snake(name), held)

    def __getattr__(self, name: str) -> Any:
        """A field that this kind of content may have, but has not, is None."""
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def model_dump(self) -> dict[str, Any]:
        return dict(self._fields)

    def __repr__(self) -> str:
        return f"Content(type={self._fields.get('type')!r})"


class MCPBaseTool:
    """Reads the results of MCP tools; the base class leaves them as they are."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name: str = tool_schema.function.name if tool_schema is not None else ""
        self.timeout = config.get("timeout", 30)

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """The text that the policy reads, and metrics about it. Images and sounds stay, after the text."""
        return " ".join(item.text for item in content if item.type == "text"), {}

    def parse_result(self, result: ToolResult) -> ToolResult:
        """The richer reading: it sees and returns all parts, structure, reward and outcome."""
        return result


def uncalled(kind: Any) -> list[str]:
    """Methods of a class that nobody here would call: it reads results, and the gateway does the rest."""
    if not (isinstance(kind, type) and issubclass(kind, MCPBaseTool)):
        return []
    return [name for name in ("create", "execute", "_call_tool", "calc_reward", "release") if hasattr(kind, name)]


def parsed(hook: MCPBaseTool, content: Any, result: ToolResult) -> ToolResult:
    """The result as the hook reads it; a hook that fails costs its reading, never the call."""
    try:
        if type(hook)._parse_tool_result is not MCPBaseTool._parse_tool_result:
            objects = [Content(item) for item in content or () if isinstance(item, Mapping)]
            text, metrics = hook._parse_tool_result(objects)
            rest = tuple(part for part in result.parts if not isinstance(part, Text))
            result = replace(result, parts=(Text(text), *rest), metrics={**result.metrics, **metrics})
        # A class that derives from an installed verl's has no such reading.
        read = getattr(hook, "parse_result", None)
        return result if read is None else read(result)
    except Exception as error:
        # It is the operator's code: whatever it raises, the policy still gets what the tool said.
        reason = f"{type(hook).__name__} cannot read it: {type(error).__name__}: {error}"
        return replace(result, metrics={**result.metrics, "parse_failed": 1}, reason=result.reason or reason)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: "_" + found[1].lower(), name)
