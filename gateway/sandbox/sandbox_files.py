"""The tool `files`: reads, writes, edits and searches files in the rollout's sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.sandbox.provider import Sandbox

MAX_FILE_BYTES = 1024 * 1024
MAX_LINES = 2000
MAX_HITS = "200"
SEARCH_S = 20.0
FILES_TEXT = (
    "Reads, writes, edits and searches files in the folder /rollout, which the tools share. `read` returns a file, or"
    " `lines` of it from `first_line`; `write` replaces a file by `text`; `edit` replaces `old`, which must occur once,"
    " by `text`; `search` returns lines below `path` that match the regular expression `pattern`."
)
FILES_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "action": {"type": "string", "enum": ["read", "write", "edit", "search"]},
        "path": {"type": "string", "description": "The file, or for `search` a file or folder."},
        "text": {"type": "string", "description": "The new text, for `write` and `edit`."},
        "old": {"type": "string", "description": "The text that `edit` replaces."},
        "pattern": {"type": "string", "description": "The regular expression for `search`."},
        "first_line": {"type": "integer", "minimum": 1, "description": "For `read`; 1 by default."},
        "lines": {"type": "integer", "minimum": 1, "description": "For `read`; all by default."},
    },
    "required": ["action", "path"],
}


class FileProblem(Exception):
    """A call that cannot be done; its text is for the policy."""


async def run_files(sandbox: Sandbox, arguments: Mapping[str, Any]) -> str:
    """Runs a call; returns the text for the policy. Raises OSError and FileProblem."""
    action, path = arguments["action"], str(arguments["path"])
    if action == "search":
        return await _search(sandbox, path, _required(arguments, "pattern"))
    if action == "read":
        content = (await sandbox.get(path, MAX_FILE_BYTES)).decode("utf-8", "replace")
        return _lines(content, int(arguments.get("first_line", 1)), int(arguments.get("lines", MAX_LINES)))
    data = _encode(_required(arguments, "text"))
    if action == "edit":  # By bytes, so that the others stay as they are, whatever they are.
        before, old = await sandbox.get(path, MAX_FILE_BYTES), _encode(_required(arguments, "old"))
        if before.count(old) != 1 or not old:
            raise FileProblem(f"`old` occurs {before.count(old) if old else 0} times in {path}; it must occur once")
        data = before.replace(old, data)
    await sandbox.put(path, data)
    lines = len(data.decode("utf-8", "replace").splitlines())
    return f"{path} was {'edited' if action == 'edit' else 'written'}: {lines} lines."


def _required(arguments: Mapping[str, Any], name: str) -> str:
    if name not in arguments:
        raise FileProblem(f"`{arguments['action']}` needs `{name}`")
    return str(arguments[name])


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _lines(text: str, first: int, count: int) -> str:
    lines = text.splitlines()
    shown = lines[first - 1 : first - 1 + min(count, MAX_LINES)]
    left = len(lines) - (first - 1) - len(shown)
    return "\n".join([*shown, *([f"[{left} more lines]"] if left > 0 else [])]) or "[no text]"


async def _search(sandbox: Sandbox, path: str, pattern: str) -> str:
    words = ("grep", "--recursive", "--line-number", "--binary-files=without-match", "--extended-regexp")
    done = await sandbox.run((*words, f"--max-count={MAX_HITS}", "-e", pattern, "--", path), b"", SEARCH_S)
    if done.stopped or done.status not in (0, 1):
        raise FileProblem(done.stopped or done.stderr.strip() or "the search failed")
    lines = done.stdout.rstrip("\n").split("\n")
    return "\n".join(sorted(lines, key=lambda line: line.partition(":")[0])) or "No line matches."
