"""A rollout is one line of JSON: what a person reads stands as text, ids and logprobs stand packed.

`v`         the format, 1; a reader that knows no such format says so and stops
`task`, `kind`, `group`, `index`, `step`, `stop`, `reason`, `rewards`, `weighed`, `timing`, `infos`   as in `Rollout`
`timeline`  `[phase, seconds since the rollout began, seconds that it took]` for each phase as it came
`ids`       all ids of the ledger in order, a packed array of `i` (see `packed.py`)
`logprobs`  those of the policy's entries one after the other, a packed array of `d`
`earlier`   ledgers before this one, each with `ids`, `logprobs` and `entries` of its own
`entries`   in order; `n` is how many of the ids belong to the entry, `author` who wrote them, and `version`, `before`,
            `cached`, `stop`, `messages`, `reward`, `source`, `info`, `outcomes`, `spans`, `widths` are as in `Entry`;
            `calls` has `[id, name, arguments]` for each call;
            `parts` has `{"kind": "text", "text": ...}`, `{"kind": "image" | "audio" | "video", "mime": ..., "sha256":
            ...}` or `{"kind": "resource", "uri": ..., ...}`: bytes lie once in `blobs/`, under their sha256.

What has its default is left out. What JSON has no word for, as objects of a plug-in's or an interaction's own, becomes
numbers where it holds numbers, and else its text. Numbers that JSON lacks are `NaN`, `Infinity` and `-Infinity`, as
Python's `json` has them; half a surrogate pair, which a model's JSON can hold, is written as its three bytes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from gateway.plain import plain
from gateway.types import Audio, Image, Outcome, Part, Resource, Text, ToolCall, Video
from trainer.ledger import NOTHING, Author, Entry, Ledger
from trainer.run.packed import pack, unpack
from trainer.run.rollout import Rollout, Span, StopReason

FORMAT = 1
MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


class Blobs(Protocol):
    """Where bytes lie, by their sha256."""

    def put(self, data: bytes) -> str: ...

    def get(self, digest: str) -> bytes: ...


def dump(rollout: Rollout, blobs: Blobs) -> bytes:
    """The line, its end included. Raises ValueError for what no text can hold, and names the rollout."""
    line = _sparse(
        v=FORMAT,
        task=rollout.task,
        group=rollout.group,
        index=rollout.index,
        step=rollout.step,
        stop=rollout.stop,
        reason=rollout.reason,
        rewards=dict(rollout.rewards),
        weighed=rollout.weighed,
        kind=rollout.kind or None,
        timing=dict(rollout.timing),
        timeline=[list(span) for span in rollout.timeline],
        infos=dict(rollout.infos),
        earlier=[_ledger(ledger, blobs) for ledger in rollout.earlier],
    ) | _ledger(rollout.ledger, blobs)
    try:
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"rollout {rollout.index} of task {rollout.task!r} cannot be saved: {error}") from error
    return text.encode("utf-8", "surrogatepass") + b"\n"


def load(line: bytes, blobs: Blobs) -> Rollout:
    """Raises ValueError for a line that holds no rollout, or one of a format that is not known here."""
    try:
        return _rollout(json.loads(line.decode("utf-8", "surrogatepass")), blobs)
    except (KeyError, TypeError, AttributeError, struct.error, zlib.error) as error:
        raise ValueError(f"the line is damaged ({type(error).__name__}: {error})") from error


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy and torch are unwrapped; there is no need to know their libraries."""
    return value.tolist() if hasattr(value, "tolist") else plain(value)


def _sparse(**fields: Any) -> dict[str, Any]:
    """Zero is a number and stays; nothing and emptiness are defaults and go."""
    return {key: value for key, value in fields.items() if value is not None and value not in ([], {})}


def _ledger(ledger: Ledger, blobs: Blobs) -> dict[str, Any]:
    return _sparse(
        ids=pack(ledger.ids, "i"),
        logprobs=pack([value for turn in ledger.turns for value in turn.logprobs or ()], "d"),
        entries=[_entry(entry, blobs) for entry in ledger],
    )


def _entry(entry: Entry, blobs: Blobs) -> dict[str, Any]:
    return _sparse(
        author=entry.author,
        n=len(entry.ids),
        version=entry.version,
        before=[list(spell) for spell in entry.before],
        cached=entry.cached or None,
        stop=entry.stop,
        messages=list(entry.messages),
        parts=[_part(part, blobs) for part in entry.parts],
        spans=list(entry.spans),
        widths=list(entry.widths),
        calls=[[call.id, call.name, call.arguments] for call in entry.calls],
        outcomes=list(entry.outcomes),
        reward=entry.reward,
        source=entry.source or None,
        info=dict(entry.info),
    )


def _part(part: Part, blobs: Blobs) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"kind": "text", "text": text}
        case Image() | Audio() | Video():
            return {"kind": type(part).__name__.lower(), "mime": part.mime, "sha256": blobs.put(part.data)}
        case Resource():
            return _sparse(
                kind="resource",
                uri=part.uri,
                mime=part.mime,
                text=part.text,
                sha256=None if part.data is None else blobs.put(part.data),
                name=part.name,
                description=part.description,
            )


def _rollout(line: dict[str, Any], blobs: Blobs) -> Rollout:
    if line["v"] != FORMAT:
        raise ValueError(f"it is of format {line['v']!r}, and this mtrl reads format {FORMAT}")
    return Rollout(
        task=line["task"],
        ledger=_read_ledger(line, blobs),
        stop=StopReason(line["stop"]),
        group=line["group"],
        index=line["index"],
        step=line.get("step"),
        rewards=line.get("rewards", NOTHING),
        weighed=line.get("weighed"),
        kind=line.get("kind", ""),
        reason=line["reason"],
        timing=line.get("timing", NOTHING),
        timeline=tuple(Span(*span) for span in line.get("timeline", ())),
        infos=line.get("infos", NOTHING),
        earlier=tuple(_read_ledger(one, blobs) for one in line.get("earlier", ())),
    )


def _read_ledger(line: dict[str, Any], blobs: Blobs) -> Ledger:
    ids, logprobs = iter(unpack(line["ids"], "i")), iter(unpack(line["logprobs"], "d"))
    ledger = Ledger(tuple(_read_entry(entry, ids, logprobs, blobs) for entry in line.get("entries", ())))
    if next(ids, None) is not None or next(logprobs, None) is not None:
        raise ValueError("the line is damaged (it has more ids or logprobs than its entries)")
    return ledger


def _read_entry(entry: dict[str, Any], ids: Iterator[int], logprobs: Iterator[float], blobs: Blobs) -> Entry:
    author, count = Author(entry["author"]), entry["n"]
    mine = tuple(islice(ids, count))
    if len(mine) < count:
        raise ValueError("the line is damaged (it has fewer ids than its entries)")
    return Entry(
        author=author,
        ids=mine,
        messages=tuple(entry.get("messages", ())),
        logprobs=tuple(islice(logprobs, count)) if author is Author.POLICY else None,
        version=entry.get("version"),
        before=tuple((version, count) for version, count in entry.get("before", ())),
        cached=entry.get("cached", 0),
        stop=entry.get("stop"),
        parts=tuple(_read_part(part, blobs) for part in entry.get("parts", ())),
        spans=tuple((start, stop) for start, stop in entry.get("spans", ())),
        widths=tuple(entry.get("widths", ())),
        calls=tuple(ToolCall(*call) for call in entry.get("calls", ())),
        outcomes=tuple(Outcome(outcome) for outcome in entry.get("outcomes", ())),
        reward=entry.get("reward"),
        source=entry.get("source", ""),
        info=entry.get("info", NOTHING),
    )


def _read_part(part: dict[str, Any], blobs: Blobs) -> Part:
    match part["kind"]:
        case "text":
            return Text(part["text"])
        case "resource":
            data = blobs.get(part["sha256"]) if "sha256" in part else None
            rest = {key: value for key, value in part.items() if key not in ("kind", "sha256")}
            return Resource(data=data, **rest)
        case kind:
            return MEDIA[kind](blobs.get(part["sha256"]), part["mime"])
