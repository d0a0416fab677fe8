"""An MCP server that runs Python code in its process, without the SDK. `folder` is its folder, and names stay.

python tests/state/code_server.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

names: dict[str, object] = {"folder": Path(sys.argv[1]), "os": os}


def answer(method: str, params: dict[str, object]) -> object:
    if method == "initialize":
        info = {"name": "code", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": "run", "inputSchema": {"type": "object"}}]}
    names["told"] = ""
    try:
        exec(params["arguments"]["code"], names)  # type: ignore[index]
    except OSError as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    return {"content": [{"type": "text", "text": str(names["told"])}]}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        known = request["method"] in ("initialize", "tools/list", "tools/call")
        refused = {"error": {"code": -32601, "message": "not found"}}
        said = {"result": answer(request["method"], request.get("params") or {})} if known else refused
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **said}) + "\n")
        sys.stdout.flush()
