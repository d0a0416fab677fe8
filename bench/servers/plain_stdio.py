"""An MCP server over stdio of the standard library alone: it starts in milliseconds, and a call costs it 40 us.

What is measured with it is the gateway that starts it. An SDK's server takes more of a core for a call than a gateway
does: the gateway then waits for each answer, and its cost depends on how the system schedules the server's threads.

`hold` answers only when as many calls have arrived as each of them says; `seen` returns how often each token arrived.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any


def _tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": name, "description": description, "inputSchema": schema}


TOOLS = [
    _tool("calculate", "Multiplies two numbers.", a="number", b="number"),
    _tool("echo", "Returns the token.", token="string"),
    _tool("hold", "Returns the token once `among` calls have arrived.", token="string", among="integer"),
    _tool("seen", "How often each token arrived at `hold`."),
]
_held: list[tuple[Any, str]] = []
"""Ids and tokens of the calls of `hold` that wait."""
_seen: Counter[str] = Counter()


def answers(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers that a request leads to: its own, those of calls that waited for it, or none yet."""
    id, params = request["id"], request.get("params", {})
    match request["method"]:
        case "initialize":
            about = {"name": "plain", "version": "1"}
            version = params["protocolVersion"]
            yield _result(id, protocolVersion=version, capabilities={"tools": {}}, serverInfo=about)
        case "tools/list":
            yield _result(id, tools=TOOLS)
        case "tools/call":
            yield from _call(id, params["name"], params.get("arguments", {}))
        case "ping":
            yield _result(id)
        case _:
            yield {"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no such method"}}


def _call(id: Any, name: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    match name:
        case "calculate":
            yield _text(id, str(arguments["a"] * arguments["b"]))
        case "echo":
            yield _text(id, arguments["token"])
        case "hold":
            _seen[arguments["token"]] += 1
            _held.append((id, arguments["token"]))
            if _seen.total() >= arguments["among"]:
                yield from (_text(*held) for held in _held)
                _held.clear()
        case "seen":
            yield _text(id, json.dumps(_seen))


def _text(id: Any, text: str) -> dict[str, Any]:
    return _result(id, content=[{"type": "text", "text": text}])


def _result(id: Any, **fields: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": fields}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            for answer in answers(request):
                print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
