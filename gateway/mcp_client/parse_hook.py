"""`MCPBaseTool`: base class for custom parsing of MCP tool results, named with `parse:` in a tools file.

Needs no MCP package, so that users' classes can be imported anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.errors import format_error, safe_repr
from gateway.types import Outcome, Text, ToolResult
from gateway.user_code import UserCode


class Content:
    """One content object of a result; fields can be read as `mimeType` or as `mime_type`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        for name, value in self._fields.items():
            nested = Content(value) if isinstance(value, Mapping) else value
            setattr(self, name, nested)
            setattr(self, _to_snake_case(name), nested)

    def __getattr__(self, name: str) -> Any:
        """None for every field that is absent."""
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def model_dump(self) -> dict[str, Any]:
        return dict(self._fields)

    def __repr__(self) -> str:
        return f"Content(type={self._fields.get('type')!r})"


class MCPBaseTool:
    """Parses the results of MCP tools; the base class leaves them as they are. Override one of the two methods."""

    text_only = False
    """Whether parts that are not text are dropped, as in verl."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name: str = tool_schema.function.name if tool_schema is not None else ""
        self.timeout = config.get("timeout", 30)
        self._instance_dict: dict[str, dict[str, Any]] = {}  # For subclasses written for verl.

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """The text for the policy, and metrics. Images and audio are kept after the text. (verl's interface.)

        An error that the tool reports is not parsed.
        """
        return " ".join(item.text for item in content if item.type == "text"), {}

    def complete_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of `_parse_tool_result`, completed."""
        return dict(metrics)

    def parse_result(self, result: ToolResult) -> ToolResult:
        """The result to use instead, with all its parts, structured content, reward and outcome."""
        return result


def unused_methods(kind: Any) -> list[str]:
    """The methods of a parser class that are never called, because the gateway itself makes the calls."""
    if not (isinstance(kind, type) and issubclass(kind, MCPBaseTool)):
        return []
    return [name for name in ("create", "execute", "_call_tool", "calc_reward", "release") if hasattr(kind, name)]


def apply_parser(parser: MCPBaseTool, content: Any, result: ToolResult) -> ToolResult:
    """The result after a user's parser; if the parser raises, the unparsed result with the failure noted."""
    try:
        with UserCode():
            return _apply(parser, content, result)
    except Exception as error:
        # This is the user's code: whatever it raises, the policy still gets the tool's answer.
        reason = f"{type(parser).__name__} cannot parse the result: {format_error(error)}"
        return replace(result, metrics={**result.metrics, "parse_failed": 1}, reason=result.reason or reason)


def _apply(parser: MCPBaseTool, content: Any, result: ToolResult) -> ToolResult:
    overrides = type(parser)._parse_tool_result is not MCPBaseTool._parse_tool_result
    if overrides and result.outcome is Outcome.OK:
        objects = [Content(item) for item in content or () if isinstance(item, Mapping)]
        text, metrics = parser._parse_tool_result(objects)
        if not isinstance(text, str):
            raise TypeError(f"_parse_tool_result returned {safe_repr(text)} as the text")
        # A class derived from an installed verl has neither of the two.
        text_only, complete = getattr(parser, "text_only", True), getattr(parser, "complete_metrics", dict)
        rest = () if text_only else tuple(part for part in result.parts if not isinstance(part, Text))
        metrics = complete(metrics)
        result = replace(result, parts=(Text(text), *rest), metrics={**result.metrics, **metrics})
    # A class derived from an installed verl has no such method.
    parse = getattr(parser, "parse_result", None)
    parsed = result if parse is None else parse(result)
    if not isinstance(parsed, ToolResult):
        raise TypeError(f"parse_result returned {safe_repr(parsed)}, not a ToolResult")
    return parsed


def _to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: "_" + match[1].lower(), name)
