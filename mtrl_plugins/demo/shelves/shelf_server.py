"""An MCP server over stdio: items are in boxes, and boxes are on shelves, in the file shelves.json of a folder.

It speaks the protocol without the SDK, whose import takes a hundred times as long as the rest:

    python shelf_server.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

NUMBER: dict[str, Any] = {"type": "integer", "minimum": 100, "maximum": 999}
TOOLS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "box_of": ("Find the box of an item.", ("item",), True),
    "shelf_of": ("Find the shelf of a box.", ("box",), True),
    "move": ("Move a box to a shelf.", ("box", "shelf"), False),
    "put": ("Put an item into a box.", ("item", "box"), False),
}
"""Each tool's description, parameters, and whether it only reads."""


class Shelves:
    """The file with what is where."""

    def __init__(self, folder: str) -> None:
        self.file = os.path.join(folder, "shelves.json")
        with open(self.file, encoding="utf-8") as opened:
            self.content: dict[str, dict[str, int]] = json.load(opened)

    def call(self, name: str, given: dict[str, Any]) -> dict[str, int]:
        """The result of a tool; raises KeyError with a text for the policy."""
        if name in ("box_of", "shelf_of"):
            kind, place = ("item", "box") if name == "box_of" else ("box", "shelf")
            return {place: self._find(kind, given[kind])}
        kind, place = ("box", "shelf") if name == "move" else ("item", "box")
        self._find(kind, given[kind])
        if place == "box":
            self._find("box", given["box"])
        self.content[kind][str(given[kind])] = given[place]
        self._save()
        return {"done": 1}

    def _find(self, kind: str, number: int) -> int:
        found = self.content[kind].get(str(number))
        if found is None:
            raise KeyError(f"there is no {kind} {number}")
        return found

    def _save(self) -> None:
        temporary = f"{self.file}.new"
        with open(temporary, "w", encoding="utf-8") as opened:
            json.dump(self.content, opened, sort_keys=True)
        os.replace(temporary, self.file)


def list_tools() -> list[dict[str, Any]]:
    """The tools as MCP lists them."""
    return [
        {
            "name": name,
            "description": description,
            "inputSchema": {
                "type": "object",
                "properties": dict.fromkeys(parameters, NUMBER),
                "required": list(parameters),
            },
            "annotations": {"readOnlyHint": reads},
        }
        for name, (description, parameters, reads) in TOOLS.items()
    ]


def answer(shelves: Shelves, method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None for a method that there is not."""
    if method == "initialize":
        info = {"name": "shelves", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": list_tools()}
    if method != "tools/call" or params.get("name") not in TOOLS:
        return None
    try:
        text, is_error = json.dumps(shelves.call(params["name"], params["arguments"])), False
    except KeyError as error:
        text, is_error = str(error.args[0]), True
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def main() -> None:
    """Answers requests, one a line, until the input ends."""
    shelves = Shelves(sys.argv[1])
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = answer(shelves, message.get("method", ""), message.get("params") or {})
        body = {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **body}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
