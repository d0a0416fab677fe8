"""An MCP server over stdio with one tool: `python plain_server.py broken` has a schema that cannot be read, and
`python plain_server.py large N` gives results of N characters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WORDS = ("nudo", "vopa", "kexi", "lowy", "tifa", "gube", "raza", "sedo", "mipa", "zaxi")


def make_listing() -> dict[str, Any]:
    kind: dict[str, Any] = {"$ref": "#/$defs/none"} if sys.argv[1] == "broken" else {"type": "string", "enum": WORDS}
    schema = {"type": "object", "properties": {"name": kind}, "required": ["name"]}
    return {"tools": [{"name": "look", "description": "Looks a name up.", "inputSchema": schema}]}


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    """Rows of codes by name, and the name is kept in the rollout's folder."""
    name, length = str(arguments.get("name")), int(sys.argv[2])
    if len(sys.argv) > 3:
        (Path(sys.argv[3]) / "last").write_text(name)
    row = {"code": f"{name}-{sum(name.encode())}", "more": "x" * 900}
    rows = {f"row {number}": {**row, "number": number} for number in range(length // 1000)}
    text = json.dumps(rows)
    return {"content": [{"type": "text", "text": text}], "structuredContent": rows}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    if message["method"] == "initialize":
        version = message["params"]["protocolVersion"]
        server = {"name": "plain", "version": "1"}
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}}
    if message["method"] == "tools/list":
        return {"result": make_listing()}
    if message["method"] == "tools/call":
        return {"result": call(message["params"]["arguments"])}
    return {"result": {}} if message["method"] == "ping" else {"error": {"code": -32601, "message": "no such method"}}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer(message)}) + "\n")
            sys.stdout.flush()
