"""An MCP server that keeps one note in a folder, without the SDK, whose import takes long.

python tests/mcp_client/notes_server.py FOLDER [tell]
"""

import json
import os
import sys
from pathlib import Path

NOTE = Path(sys.argv[1]) / "note.txt"


def write(text: str) -> str:
    return write_to(str(NOTE), text)


def write_to(path: str, text: str) -> str:
    Path(path).write_text(text)
    return "written"


def read() -> str:
    return NOTE.read_text() if NOTE.exists() else "nothing"


def path() -> str:
    return str(NOTE)


def where() -> str:
    """The folder, in hexadecimal."""
    return str(NOTE.parent).encode().hex()


def environment() -> str:
    return json.dumps({**os.environ, "cwd": str(Path.cwd())})


TOOLS = {tool.__name__: tool for tool in (write, write_to, read, path, where, environment)}

# With a second argument the server tells where its folder is, wherever a server can.
INSTRUCTIONS = f"Keeps one note in {NOTE.parent}." if sys.argv[2:] else "Keeps one note."
PLAIN: dict[str, object] = {"inputSchema": {"type": "object"}}
FILE = {"type": "string", "enum": [str(NOTE)], "description": f"A file in {NOTE.parent}"}
WRITE_TO: dict[str, object] = {
    "description": f"Writes into {NOTE.parent}.",
    "inputSchema": {"type": "object", "properties": {"path": FILE}},
}
DESCRIBED = {"write_to": WRITE_TO} if sys.argv[2:] else {}
EXTRA = {"_meta": {"example.org/kind": "note"}, "execution": {"taskSupport": "forbidden"}}


def answer(method: str, params: dict[str, object]) -> object:
    if method == "initialize":
        info = {"name": "notes", "version": "1"}
        about = {"serverInfo": info, "instructions": INSTRUCTIONS}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, **about}
    if method == "tools/list":
        return {"tools": [{"name": name, **DESCRIBED.get(name, PLAIN), **EXTRA} for name in TOOLS]}
    try:
        text, failed = TOOLS[str(params["name"])](**params["arguments"]), False  # type: ignore[operator]
    except OSError as error:
        text, failed = str(error), True
    structured = {"structuredContent": {str(NOTE): text}} if params["name"] == "path" else {}
    return {"content": [{"type": "text", "text": text}], "isError": failed, **structured}


def send(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") in ("initialize", "tools/list", "tools/call"):
        send({"id": request["id"], "result": answer(request["method"], request.get("params") or {})})
    elif "id" in request:
        send({"id": request["id"], "error": {"code": -32601, "message": "not found"}})
