"""The tapes that lie within reach of the gateway, and what is on one; looked at as files, never played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.types import ASGIApp

from gateway.errors import ReplayError
from gateway.http.asked import Asked
from gateway.http.desk import Desk
from gateway.http.reply import Problem, json_reply
from gateway.tape.read import Opening, Tape, load

SESSIONS = 20
"""Of one answer."""
ENTRIES = 50
"""Of one session."""
SHOWN = 2000
"""Characters of a text."""

Line = dict[str, Any]


async def shelf(desk: Desk, asked: Asked) -> ASGIApp:
    found = await to_thread.run_sync(_within_reach, desk)
    data = [_told(name, file) for name, file in found.items()]
    return json_reply({"object": "list", "data": sorted(data, key=lambda line: -float(line["changed_at"]))})


async def tape(desk: Desk, asked: Asked) -> ASGIApp:
    name, start = asked.path["id"], asked.number("from")
    found = (await to_thread.run_sync(_within_reach, desk)).get(name)
    if found is None:
        raise Problem(404, "not_found", "There is no such tape.", remedy="GET /v1/tapes lists them.", param="id")
    try:
        return json_reply(_told(name, found) | await to_thread.run_sync(_read, found.parent, start))
    except ReplayError as error:
        raise Problem(409, "conflict", str(error)) from None


def _within_reach(desk: Desk) -> Mapping[str, Path]:
    """By name, the first line's file of each: what is asked for is compared with these, and never opened itself."""
    settings = desk.settings
    folder = settings.tapes
    beside = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
    files = {path.name: path / "tape.jsonl" for path in (*beside, *([settings.tape] if settings.tape else []))}
    return {name: file for name, file in files.items() if file.is_file()}


def _told(name: str, file: Path) -> Line:
    stat = file.stat()
    return {"name": name, "changed_at": stat.st_mtime, "lines_bytes": stat.st_size}


def _read(path: Path, start: int) -> Line:
    tape = load(path)
    sessions = list(tape.sessions.values())
    shown = sessions[start : start + SESSIONS]
    return {
        "summary": asdict(tape.summary),
        "start": start,
        "sessions": [
            {
                "session": opening.session,
                "task_id": str(opening.task.get("id", "")),
                "feedback": opening.interaction,
                "closed": opening.session in tape.closed,
                "more": max(0, len(opening.entries) - ENTRIES),
                "entries": list(_entries(tape, opening)),
            }
            for opening in shown
        ],
    }


def _entries(tape: Tape, opening: Opening) -> Iterator[Line]:
    for entry in opening.entries[:ENTRIES]:
        line = tape.line(entry)
        answer = line.get("answer") or {}
        yield {
            "kind": line["kind"],
            "name": str(line.get("name", ""))[:SHOWN],
            "arguments": str(line.get("arguments", ""))[:SHOWN],
            "outcome": answer.get("outcome"),
            "elapsed_s": answer.get("elapsed_s"),
            "score": answer.get("score"),
            "rewards": line.get("rewards"),
            "refused": line.get("refused"),
            "parts": [_part(part) for part in answer.get("parts", ())[:16]],
        }


def _part(part: Line) -> Line:
    return {"type": part["type"], "text": str(part.get("text") or "")[:SHOWN], "mime": part.get("mime")}
