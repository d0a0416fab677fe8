"""Ids of calls that say which turn of the policy they belong to."""

from __future__ import annotations

import re


def make_call_id(turn: int, index: int, session: str) -> str:
    """The id of a turn's call; no other call of the session has it."""
    return f"call_{turn}_{index}_{session[:6]}"


_OWN = re.compile(r"call_\d+_\d+_([0-9a-f]{6})")


def find_session(id: str) -> str | None:
    """The session's part of a call's id; None if the id is not of this form."""
    match = _OWN.fullmatch(id)
    return match[1] if match else None


def find_turn(id: str) -> tuple[str, str] | None:
    """What ids of one turn have in common; None if the id is not ours."""
    parts = id.split("_", 3)
    return (parts[1], parts[3]) if len(parts) == 4 and parts[0] == "call" else None
