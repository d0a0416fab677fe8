"""A refusal says what was asked, where, and what the tape could have answered instead."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

from gateway.errors import ReplayError
from gateway.tape.asked import FINISH, Key, canonical
from gateway.tape.lines import Line, task_line
from gateway.tape.read import Entry, Tape
from gateway.types import Task

LOOKED_AT = 200
"""Recorded questions that are compared with the one refused."""
SHOWN = 200
"""Characters of one question in a message."""


def no_session(tape: Tape, task: Task) -> ReplayError:
    recorded = [sessions[0].task for sessions in islice(tape.openings.values(), LOOKED_AT)]
    ids = _nearest(repr(task.id), (repr(one["id"]) for one in recorded))
    problem = f"{tape.path}: no session was recorded for task {task.id!r} as it is; recorded tasks: {ids}"
    same_id = next((one for one in recorded if one["id"] == task.id), None)
    if same_id is None:
        return ReplayError(problem)
    asked = task_line(task)
    names = dict.fromkeys((*asked, *same_id))
    others = [name for name in names if name != "ttl_s" and canonical(asked.get(name)) != canonical(same_id.get(name))]
    return ReplayError(f"{problem}. The task of that id differs in: {', '.join(others)}")


def no_answer(tape: Tape, key: Key, asked: Line, place: str) -> ReplayError:
    problem = f"{tape.path}: {place}: {shown(asked)}"
    recorded = len(tape.entries(key))
    if recorded:
        return ReplayError(
            f"{problem} was recorded {recorded} times, and open sessions of this task hold every answer; "
            "close one, record more of them, or declare the tool `pure`"
        )
    there = tape.answers.get(key.after, {})
    here = [entry for (question, _), entries in there.items() if question != FINISH for entry in entries]
    if here:
        instead = f"There the tape has: {_questions(tape, here, asked)}"
    elif there:
        instead = "There the recorded sessions end"
    else:
        entries = (entry for session in tape.sessions.values() for entry in session.entries)
        instead = f"What was asked before is not on it in this order; it has: {_questions(tape, entries, asked)}"
    return ReplayError(f"{problem} is not on the tape. {instead}")


def shown(line: Line) -> str:
    """A question as a person reads it."""
    if line["kind"] == "call":
        text = f"{line['name']}({line['arguments']})"
    elif line["kind"] == "feedback":
        text = f"feedback on {json.dumps(line['messages'][-1:], ensure_ascii=False, default=str)}"
    else:
        text = "the rewards of the end"
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _questions(tape: Tape, entries: Iterable[Entry], asked: Line) -> str:
    return _nearest(shown(asked), (shown(tape.line(entry)) for entry in islice(entries, LOOKED_AT)))


def _nearest(asked: str, recorded: Iterable[str]) -> str:
    return ", ".join(get_close_matches(asked, dict.fromkeys(recorded), n=3, cutoff=0.0)) or "nothing"
