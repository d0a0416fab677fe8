"""An MCP server over stdio of the standard library alone, with a tool `calculate`: it starts in milliseconds.

What is measured with it is the gateway that starts it, not an SDK's import.
"""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "calculate",
    "description": "Multiplies two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a request, or its error."""
    match method:
        case "initialize":
            about = {"name": "plain", "version": "1"}
            version = params["protocolVersion"]
            return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
        case "tools/list":
            return {"result": {"tools": [TOOL]}}
        case "tools/call":
            product = params["arguments"]["a"] * params["arguments"]["b"]
            return {"result": {"content": [{"type": "text", "text": str(product)}]}}
        case "ping":
            return {"result": {}}
    return {"error": {"code": -32601, "message": "no such method"}}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            answered = answer(request["method"], request.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answered}), flush=True)


if __name__ == "__main__":
    main()
