"""The on-disk format of a rollout: one line of JSON, with token ids and logprobs as packed arrays.

`v`         the format version, 1; readers reject others
`task`, `kind`, `group`, `index`, `step`, `stop`, `reason`, `rewards`, `weighed`, `timing`, `infos`   as in `Rollout`
`timeline`  `[phase, seconds since the rollout's start, duration in seconds]` for each phase, in order
`ids`       all ids of the ledger, a packed array of `i`
`logprobs`  those of all policy entries, concatenated, a packed array of `d`
`earlier`   ledgers before this one, each with `ids`, `logprobs` and `entries` of its own
`entries`   in order; `n` is the number of the entry's ids, `author` who wrote them, and `version`, `before`,
            `cached`, `stop` (its `earlier_versions`, `cached_tokens`, `finish_reason`), `messages`, `reward`, `source`,
            `info`, `outcomes`, `spans`, `widths` are as in `Entry`;
            `calls` has `[id, name, arguments]` for each call;
            `parts` has `{"kind": "text", "text": ...}`, `{"kind": "image" | "audio" | "video", "mime": ..., "sha256":
            ...}` or `{"kind": "resource", "uri": ..., ...}`, with the bytes in `blobs/`, under their sha256.

A packed array is `plain:` or `deflate:` (whichever is shorter), followed by its little-endian bytes, or these bytes
compressed by zlib, in base64; so nothing is rounded. In Python an array of ids is read by
`struct.iter_unpack("<i", zlib.decompress(base64.b64decode(text.removeprefix("deflate:"))))`.

Default values are omitted. Values that JSON cannot represent, such as a plug-in's own objects, become numbers if they
hold numbers, and otherwise text. Non-finite numbers are `NaN`, `Infinity` and `-Infinity`, as in Python's `json`. A
lone surrogate, which JSON written by a model can contain, is encoded as three bytes.
"""

from __future__ import annotations

import json
import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from gateway.disk_errors import write_atomically
from gateway.types import EMPTY, Audio, Image, Outcome, Part, Resource, Text, ToolCall, Video
from gateway.wire import to_plain
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, Span, StopReason


class BlobFolder:
    """A folder with one file per blob, safe for several threads and processes: equal names mean equal bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        file = self.path / digest
        if not (file.exists() and file.stat().st_size == len(data)):  # A power cut may leave a short one.
            self.path.mkdir(exist_ok=True)  # Its parent is the run, which is not made anew if it was removed.
            write_atomically(file, data, sync=False)
        return digest

    def get(self, digest: str) -> bytes:
        if len(digest) != 64 or not digest.isalnum():
            raise ValueError(f"{digest[:80]!r} is not a sha256")  # This also rejects paths out of the folder.
        file = self.path / digest
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from error
        if sha256(data).hexdigest() != digest:
            raise ValueError(f"{file} is damaged: its content does not match the sha256 in its name")
        return data


ITEM_BYTES = {"i": 4, "d": 8}
MAX_ARRAY_BYTES = 1 << 28
"""The bytes of one packed array that are read."""


def pack_array(values: Sequence[float], kind: str) -> str:
    """Encodes numbers as text; `kind` is `i` for 32-bit integers or `d` for doubles."""
    data = struct.pack(f"<{len(values)}{kind}", *values)
    compressed = zlib.compress(data)
    name, stored = ("deflate", compressed) if len(compressed) < len(data) else ("plain", data)
    return f"{name}:{b64encode(stored).decode()}"


def unpack_array(text: str, kind: str) -> tuple[Any, ...]:
    """The numbers that `pack_array` encoded."""
    name, _, stored = text.partition(":")
    if name not in ("plain", "deflate"):
        raise ValueError(f"unknown encoding {name[:20]!r} of a packed array; known are plain and deflate")
    data = b64decode(stored, validate=True)
    try:
        if name == "deflate":
            data = _decompress(data)
        return struct.unpack(f"<{len(data) // ITEM_BYTES[kind]}{kind}", data)
    except (struct.error, zlib.error) as error:
        raise ValueError(f"a packed array is damaged ({error})") from error


def _decompress(data: bytes) -> bytes:
    """Like `zlib.decompress`, but bounded: a few bytes can stand for gigabytes."""
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(data, MAX_ARRAY_BYTES + 1)
    if len(content) > MAX_ARRAY_BYTES:
        raise ValueError(f"a packed array has more than {MAX_ARRAY_BYTES} bytes")
    if not decompressor.eof:
        raise ValueError("a packed array is damaged (its end is missing)")
    return content


FORMAT_VERSION = 1
MEDIA_TYPES: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


class BlobStore(Protocol):
    """A store of bytes by their sha256."""

    def put(self, data: bytes) -> str: ...

    def get(self, digest: str) -> bytes: ...


def dump_rollout(rollout: Rollout, blobs: BlobStore) -> bytes:
    """The rollout as a line with its line end. Raises ValueError, with the rollout's name, if it cannot be encoded."""
    fields = _without_defaults(
        v=FORMAT_VERSION,
        task=rollout.task,
        group=rollout.group,
        index=rollout.index,
        step=rollout.step,
        stop=rollout.stop,
        reason=rollout.reason,
        rewards=dict(rollout.rewards),
        weighed=rollout.weighted_reward,
        kind=rollout.kind or None,
        timing=dict(rollout.timing),
        timeline=[list(span) for span in rollout.timeline],
        infos=dict(rollout.infos),
        earlier=[_ledger_to_json(ledger, blobs) for ledger in rollout.earlier],
    ) | _ledger_to_json(rollout.ledger, blobs)
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=_to_jsonable)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"rollout {rollout.index} of task {rollout.task!r} cannot be saved: {error}") from error
    return text.encode("utf-8", "surrogatepass") + b"\n"


def load_rollout(line: bytes, blobs: BlobStore) -> Rollout:
    """The rollout of a line. Raises ValueError for a damaged line or another format version."""
    try:
        return _rollout_from_json(load_fields(line), blobs)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the line is damaged ({type(error).__name__}: {error})") from error


def load_fields(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, with packed arrays as they are. Raises ValueError for another format version."""
    fields: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
    if fields["v"] != FORMAT_VERSION:
        raise ValueError(f"it has format version {fields['v']!r}, but this mtrl reads format version {FORMAT_VERSION}")
    return fields


def _to_jsonable(value: Any) -> Any:
    """A JSON value for an object; arrays and numbers of numpy and torch are unwrapped without importing either."""
    return value.tolist() if hasattr(value, "tolist") else to_plain(value)


def _without_defaults(**fields: Any) -> dict[str, Any]:
    """The fields that are neither None nor empty; 0 stays."""
    return {key: value for key, value in fields.items() if value is not None and value not in ([], {})}


def _ledger_to_json(ledger: Ledger, blobs: BlobStore) -> dict[str, Any]:
    return _without_defaults(
        ids=pack_array(ledger.ids, "i"),
        logprobs=pack_array([value for turn in ledger.turns for value in turn.logprobs or ()], "d"),
        entries=[_entry_to_json(entry, blobs) for entry in ledger],
    )


def _entry_to_json(entry: Entry, blobs: BlobStore) -> dict[str, Any]:
    return _without_defaults(
        author=entry.author,
        n=len(entry.ids),
        version=entry.version,
        before=[list(version_count) for version_count in entry.earlier_versions],
        cached=entry.cached_tokens or None,
        stop=entry.finish_reason,
        messages=list(entry.messages),
        parts=[_part_to_json(part, blobs) for part in entry.parts],
        spans=list(entry.spans),
        widths=list(entry.widths),
        calls=[[call.id, call.name, call.arguments] for call in entry.calls],
        outcomes=list(entry.outcomes),
        reward=entry.reward,
        source=entry.source or None,
        info=dict(entry.info),
    )


def _part_to_json(part: Part, blobs: BlobStore) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"kind": "text", "text": text}
        case Image() | Audio() | Video():
            return {"kind": type(part).__name__.lower(), "mime": part.mime, "sha256": blobs.put(part.data)}
        case Resource():
            return _without_defaults(
                kind="resource",
                uri=part.uri,
                mime=part.mime,
                text=part.text,
                sha256=None if part.data is None else blobs.put(part.data),
                name=part.name,
                description=part.description,
            )


def _rollout_from_json(line: dict[str, Any], blobs: BlobStore) -> Rollout:
    return Rollout(
        task=line["task"],
        ledger=_ledger_from_json(line, blobs),
        stop=StopReason(line["stop"]),
        group=line["group"],
        index=line["index"],
        step=line.get("step"),
        rewards=line.get("rewards", EMPTY),
        weighted_reward=line.get("weighed"),
        kind=line.get("kind", ""),
        reason=line["reason"],
        timing=line.get("timing", EMPTY),
        timeline=tuple(Span(*span) for span in line.get("timeline", ())),
        infos=line.get("infos", EMPTY),
        earlier=tuple(_ledger_from_json(ledger, blobs) for ledger in line.get("earlier", ())),
    )


def _ledger_from_json(line: dict[str, Any], blobs: BlobStore) -> Ledger:
    ids, logprobs = iter(unpack_array(line["ids"], "i")), iter(unpack_array(line["logprobs"], "d"))
    ledger = Ledger(tuple(_entry_from_json(entry, ids, logprobs, blobs) for entry in line.get("entries", ())))
    if next(ids, None) is not None or next(logprobs, None) is not None:
        raise ValueError("the line is damaged (it has more ids or logprobs than its entries)")
    return ledger


def _entry_from_json(entry: dict[str, Any], ids: Iterator[int], logprobs: Iterator[float], blobs: BlobStore) -> Entry:
    author, count = Author(entry["author"]), entry["n"]
    entry_ids = tuple(islice(ids, count))
    if len(entry_ids) < count:
        raise ValueError("the line is damaged (it has fewer ids than its entries)")
    return Entry(
        author=author,
        ids=entry_ids,
        messages=tuple(entry.get("messages", ())),
        logprobs=tuple(islice(logprobs, count)) if author is Author.POLICY else None,
        version=entry.get("version"),
        earlier_versions=tuple((version, count) for version, count in entry.get("before", ())),
        cached_tokens=entry.get("cached", 0),
        finish_reason=entry.get("stop"),
        parts=tuple(_part_from_json(part, blobs) for part in entry.get("parts", ())),
        spans=tuple((start, stop) for start, stop in entry.get("spans", ())),
        widths=tuple(entry.get("widths", ())),
        calls=tuple(ToolCall(*call) for call in entry.get("calls", ())),
        outcomes=tuple(Outcome(outcome) for outcome in entry.get("outcomes", ())),
        reward=entry.get("reward"),
        source=entry.get("source", ""),
        info=entry.get("info", EMPTY),
    )


def _part_from_json(part: dict[str, Any], blobs: BlobStore) -> Part:
    match part["kind"]:
        case "text":
            return Text(part["text"])
        case "resource":
            data = blobs.get(part["sha256"]) if "sha256" in part else None
            rest = {key: value for key, value in part.items() if key not in ("kind", "sha256")}
            return Resource(data=data, **rest)
        case kind:
            return MEDIA_TYPES[kind](blobs.get(part["sha256"]), part["mime"])
