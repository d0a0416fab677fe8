"""A rollout as a page wants it: who said what, token by token, and why each was (not) trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from gateway.types import Resource, Text
from trainer.ledger import Author, Entry
from trainer.page.said import BYTES
from trainer.page.words import Words
from trainer.run.rollout import Rollout
from trainer.view.credited import Credited
from trainer.view.text import printable
from trainer.view.why import because, weightless


def told(rollout: Rollout, words: Words | None, credited: Credited) -> dict[str, Any]:
    ledgers = [{"entries": list(_entries(rollout, number, words, credited))} for number in range(len(rollout.ledgers))]
    return {
        "task": rollout.task,
        "group": rollout.group,
        "index": rollout.index,
        "stop": rollout.stop,
        "infrastructure": rollout.stop.infrastructure,
        "reason": printable(rollout.reason),
        "rewards": dict(rollout.rewards),
        "timing": dict(rollout.timing),
        "timeline": [list(span) for span in rollout.timeline],
        "infos": dict(rollout.infos),
        "credited": bool(credited.ledgers),
        "ledgers": ledgers,
    }


def _entries(rollout: Rollout, number: int, words: Words | None, credited: Credited) -> Iterator[dict[str, Any]]:
    ledger, credit = rollout.ledgers[number], credited.tokens(number)
    answers = iter(ledger.rewards)
    turn = sum(len(before.turns) for before in rollout.ledgers[:number]) - 1
    for place, (start, seen, entry) in enumerate(zip(ledger.starts, ledger.expanded.starts, ledger, strict=True)):
        said: Sequence[float] = ()
        if entry.author is Author.POLICY:
            turn, said = turn + 1, next(answers)
        mine = credit[seen : seen + len(entry.ids)]
        weighty = max(mine, key=lambda one: (one[2], abs(one[1])), default=None)
        trained, why = because(rollout, entry, said, weighty, credited.nothing)
        idle = [at for at, one in enumerate(mine) if not one[2]] if trained else []
        yield _sparse(
            author=entry.author,
            source=printable(entry.source) or None,
            turn=turn if turn >= 0 else None,
            start=start,
            seen=seen,
            ids=list(entry.ids),
            pieces=words.pieces(entry.ids) if words else None,
            logprobs=None if entry.logprobs is None else [round(value, 5) for value in entry.logprobs],
            advantages=[one[1] for one in mine] if mine and entry.author is Author.POLICY else None,
            weights=[one[2] for one in mine] if mine and entry.author is Author.POLICY else None,
            version=entry.version,
            versions=list(ledger.versions[start : start + len(entry.ids)]) if entry.before else None,
            cached=entry.cached,
            stop=entry.stop,
            messages=[_shown(message) for message in entry.messages],
            calls=[_call(call) for call in _calls(entry, ledger.entries[place + 1 : place + 2])],
            outcomes=list(entry.outcomes),
            reward=entry.reward,
            parts=[_part(part) for part in entry.parts],
            spans=[list(span) for span in entry.spans],
            widths=list(entry.widths),
            info={name: value for name, value in entry.info.items() if name != "own"},
            trained=trained,
            because=printable(why),
            because_not=weightless(entry, idle) if idle else None,
        )


def _calls(turn: Entry, behind: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Each call with its answer: how it ended, how long it took, what it said."""
    if turn.author is not Author.POLICY:
        return
    answer = next((entry for entry in behind if entry.author is Author.TOOL), None)
    outcomes = answer.outcomes if answer else ()
    known: Sequence[Mapping[str, Any]] = answer.info.get("tools", ()) if answer else ()
    messages = answer.messages if answer else ()
    for call, outcome, more, message in zip_longest(turn.calls, outcomes, known, messages):
        yield {
            "id": call.id if call else None,
            "name": call.name if call else None,
            "arguments": call.arguments if call else None,
            "outcome": outcome,
            "elapsed_s": more.get("elapsed_s") if more else None,
            "content": _shown(message).get("content") if message else None,
        }


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in call.items() if value is not None}
    for name in ("name", "arguments"):
        if isinstance(shown.get(name), str):
            shown[name] = printable(shown[name])
    return shown


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """Text that acts instead of being seen stands as its code; bytes are told by their places alone."""
    return {str(name): _plain(value) for name, value in message.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value[:40]}…" if BYTES.match(value) else printable(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _part(part: Any) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"kind": "text", "text": printable(text)}
        case Resource():
            said = None if part.text is None else printable(part.text)
            return {"kind": "resource", "uri": printable(part.uri), "text": said, "mime": part.mime}
    return {
        "kind": type(part).__name__.lower(),
        "mime": part.mime,
        "sha256": sha256(part.data).hexdigest(),
        "bytes": len(part.data),
    }


def _sparse(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {})}
