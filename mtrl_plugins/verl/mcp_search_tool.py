"""verl's `MCPSearchTool`: keeps the `results` of a search server's answer, and counts queries and titles."""

from __future__ import annotations

import re
from typing import Any

from mtrl_plugins.verl.mcp_base_tool import MCPBaseTool

_QUERY = re.compile(r'query"\s*:\s*"([^"]+)"')
_TITLE = re.compile(r'"title"\s*:')
_RESULTS = re.compile(r'"results"\s*:\s*(\[.*?\])', re.DOTALL)


class MCPSearchTool(MCPBaseTool):
    """Parses answers as verl's tool does: by patterns, so that single quotes and half a JSON document will do."""

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        texts = [item.text.replace("'", '"') for item in content if item.type == "text"]
        queries = [match[1] if (match := _QUERY.search(text)) else "" for text in texts]
        results = "".join(match[1] if (match := _RESULTS.search(text)) else "" for text in texts)
        metrics = {
            "api_request_error": "",
            "status": "success",
            "total_results": sum(len(_TITLE.findall(text)) for text in texts),
            "queries": queries,
            "query_count": len(queries),
        }
        return results, metrics
