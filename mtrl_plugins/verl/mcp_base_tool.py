"""verl's `MCPBaseTool`: the policy reads the texts of an answer alone, joined by spaces, and metrics have verl's keys.

The gateway's own `MCPBaseTool` (`gateway.mcp_client.parse_hook`) leaves answers as they are, and keeps images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.mcp_client import parse_hook


class MCPBaseTool(parse_hook.MCPBaseTool):
    """Parses answers as verl's class does; of its methods only `_parse_tool_result` can be overridden."""

    text_only = True

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        return " ".join(item.text for item in content if item.type == "text"), {}

    def complete_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics with those that verl makes of each answer; it takes an answer that was parsed as no error."""
        defaults = {"query_count": 0, "status": "unknown", "total_results": 0}
        return {**defaults, **metrics, "api_request_error": None}
