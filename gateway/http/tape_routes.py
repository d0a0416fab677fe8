"""Routes under /v1/tapes: the tapes in the tapes folder and the contents of one, read without replaying it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.types import ASGIApp

from gateway.errors import ReplayError
from gateway.http.exchange import Problem, Request, json_response
from gateway.http.state import AppState
from gateway.tape.tape_file import SessionRecord, Tape, load_tape

SESSIONS_PER_RESPONSE = 20
"""Sessions in one response."""
ENTRIES_PER_SESSION = 50
"""Entries shown of one session."""
MAX_CHARS = 2000
"""Characters shown of a text."""

Line = dict[str, Any]


async def list_tapes(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/tapes, the latest first."""
    tapes = await to_thread.run_sync(_find_tapes, app)
    data = [_tape_to_json(name, file) for name, file in tapes.items()]
    return json_response({"object": "list", "data": sorted(data, key=lambda line: -float(line["changed_at"]))})


async def read_tape(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/tapes/{id}."""
    name, start = request.path_params["id"], request.query_number("from")
    file = (await to_thread.run_sync(_find_tapes, app)).get(name)
    if file is None:
        raise Problem(404, "not_found", "There is no such tape.", remedy="GET /v1/tapes lists them.", param="id")
    try:
        return json_response(_tape_to_json(name, file) | await to_thread.run_sync(_read_sessions, file.parent, start))
    except ReplayError as error:
        raise Problem(409, "conflict", str(error)) from None


def _find_tapes(app: AppState) -> Mapping[str, Path]:
    """Each tape's `tape.jsonl` by name. A requested name is looked up here and never used as a path."""
    settings = app.settings
    folder = settings.tapes
    listed = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
    files = {path.name: path / "tape.jsonl" for path in (*listed, *([settings.tape] if settings.tape else []))}
    return {name: file for name, file in files.items() if file.is_file()}


def _tape_to_json(name: str, file: Path) -> Line:
    stat = file.stat()
    return {"name": name, "changed_at": stat.st_mtime, "lines_bytes": stat.st_size}


def _read_sessions(path: Path, start: int) -> Line:
    tape = load_tape(path)
    sessions = list(tape.sessions.values())
    shown = sessions[start : start + SESSIONS_PER_RESPONSE]
    return {
        "summary": asdict(tape.summary),
        "start": start,
        "sessions": [
            {
                "session": opening.session,
                "task_id": str(opening.task.get("id", "")),
                "feedback": opening.interaction,
                "closed": opening.session in tape.closed,
                "more": max(0, len(opening.entries) - ENTRIES_PER_SESSION),
                "entries": list(_entries_to_json(tape, opening)),
            }
            for opening in shown
        ],
    }


def _entries_to_json(tape: Tape, opening: SessionRecord) -> Iterator[Line]:
    for entry in opening.entries[:ENTRIES_PER_SESSION]:
        line = tape.read_line(entry)
        answer = line.get("answer") or {}
        yield {
            "kind": line["kind"],
            "name": str(line.get("name", ""))[:MAX_CHARS],
            "arguments": str(line.get("arguments", ""))[:MAX_CHARS],
            "outcome": answer.get("outcome"),
            "elapsed_s": answer.get("elapsed_s"),
            "score": answer.get("score"),
            "rewards": line.get("rewards"),
            "refused": line.get("refused"),
            "parts": [_part_to_json(part) for part in answer.get("parts", ())[:16]],
        }


def _part_to_json(part: Line) -> Line:
    return {"type": part["type"], "text": str(part.get("text") or "")[:MAX_CHARS], "mime": part.get("mime")}
