"""Values of tasks, requests to the engine and their answers as messages.

Tuples, bytes, images, audio and videos come back as they were; bytes travel as blobs, and ids and logprobs are packed,
so that nothing is rounded.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter

from gateway.errors import ConfigError
from gateway.types import Audio, Image, Video
from gateway.types import Task as SessionTask
from trainer.engine.base import Generation, Sampling
from trainer.rollout.task import Task
from trainer.storage.rollout_line import MEDIA_TYPES, BlobStore, unpack_array

MARK = "$"
"""How a tag begins; a mapping with such a key is written as its items."""
MAX_BLOB_BYTES = 1 << 29
"""The bytes of one rollout's blobs that are taken from the other side."""


class Blobs:
    """The blobs of one rollout that both sides have. A new one is sent before the message that names it."""

    def __init__(self, send: Callable[[dict[str, Any]], None], rollout: int) -> None:
        self._send, self._rollout = send, rollout
        self._data: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        """Sends a blob, unless the other side has it. Raises ValueError if it would take no more."""
        digest = sha256(data).hexdigest()
        if digest not in self._data:
            self._require_room(data)
            self._send({"t": "blob", "r": self._rollout, "data": b64encode(data).decode()})
            self._data[digest] = data
        return digest

    def get(self, digest: str) -> bytes:
        """A blob. Raises ValueError if it was not sent."""
        try:
            return self._data[digest]
        except KeyError:
            raise ValueError(f"the blob {digest[:80]!r} was not sent") from None

    def receive(self, message: Mapping[str, Any]) -> None:
        """Takes a blob of the other side. Raises ValueError for one that is damaged, or too many."""
        try:
            data = b64decode(message["data"], validate=True)
        except (Base64Error, TypeError) as error:
            raise ValueError(f"a blob is damaged: {error}") from None
        self._require_room(data)
        self._data[sha256(data).hexdigest()] = data

    def _require_room(self, data: bytes) -> None:
        if sum(map(len, self._data.values())) + len(data) > MAX_BLOB_BYTES:
            raise ValueError(f"the blobs of a rollout have more than {MAX_BLOB_BYTES} bytes")


class _NoBlobs:
    """Takes blobs and sends nothing."""

    def put(self, data: bytes) -> str:
        return ""

    def get(self, digest: str) -> bytes:
        raise NotImplementedError("nothing is kept here")


def find_unsendable_values(tasks: Iterable[Task]) -> list[ConfigError]:
    """Tasks with a value that no message can hold: the first row of each such column, and how many rows have it."""
    rows: Counter[str] = Counter()
    first: dict[str, tuple[str, str]] = {}
    for task in tasks:
        try:
            task_to_plain(task, _NoBlobs())
        except ValueError as error:
            place, _, reason = str(error).partition(" ")
            place = re.sub(r"\[\d+\]", "[]", place)
            rows[place] += 1
            first.setdefault(place, (task.location or task.id, f"{place} {reason}"))
    return [
        ConfigError(
            f"{problem} ({count} rows)" if (count := rows[place]) > 1 else problem,
            file=location,
            remedy="store it as text, a number, a list or bytes; or leave out `rollout.workers` and `rollout.listen`",
        )
        for place, (location, problem) in first.items()
    ]


def task_to_plain(task: Task, blobs: BlobStore) -> dict[str, Any]:
    """A task as JSON. Raises ValueError, with the place, for a value that cannot be sent."""
    session = task.session_task
    fields = {
        "id": task.id,
        "messages": task.messages,
        "truth": task.truth,
        "columns": task.columns,
        "location": task.location,
        "session": {
            "id": session.id,
            "tools": session.tools,
            "create": session.create,
            "feedback": session.feedback,
            "feedback_args": session.feedback_args,
            "ttl_s": session.ttl_s,
            "state": session.state,
            "hash_state": session.hash_state,
        },
    }
    return {name: _to_plain(value, blobs, name) for name, value in fields.items()}


def task_from_plain(plain: Mapping[str, Any], blobs: BlobStore) -> Task:
    """The task that `task_to_plain` encoded."""
    fields = {name: _from_plain(value, blobs) for name, value in plain.items()}
    session = SessionTask(**fields.pop("session"))
    return Task(**fields, session_task=session)


def _to_plain(value: Any, blobs: BlobStore, place: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
            return {key: _to_plain(item, blobs, f"{place}.{key}") for key, item in value.items()}
        items = [[_to_plain(key, blobs, place), _to_plain(item, blobs, place)] for key, item in value.items()]
        return {"$items": items}
    if isinstance(value, list):
        return [_to_plain(item, blobs, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": _to_plain(list(value), blobs, place)}
    if isinstance(value, Image | Audio | Video):
        return {f"${type(value).__name__.lower()}": [blobs.put(value.data), value.mime]}
    if isinstance(value, bytes):
        return {"$bytes": blobs.put(value)}
    raise ValueError(f"{place} is a {type(value).__name__}, which cannot be sent to a rollout worker")


def _from_plain(value: Any, blobs: BlobStore) -> Any:
    if isinstance(value, list):
        return [_from_plain(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith(MARK):
        return {key: _from_plain(item, blobs) for key, item in value.items()}
    content = value[tag]
    if tag == "$items":
        return {_from_plain(key, blobs): _from_plain(item, blobs) for key, item in content}
    if tag == "$tuple":
        return tuple(_from_plain(item, blobs) for item in content)
    if tag == "$bytes":
        return blobs.get(content)
    digest, mime = content
    return MEDIA_TYPES[tag.removeprefix(MARK)](blobs.get(digest), mime)


_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
_SAMPLING = TypeAdapter(Sampling)
_get_sampling = attrgetter(*_SAMPLING_FIELDS)


def pack_plain(values: Sequence[float], kind: str) -> str:
    """Like `pack_array`, but never compressed: it is read once, by a process that waits for it."""
    return f"plain:{b64encode(struct.pack(f'<{len(values)}{kind}', *values)).decode()}"


def sampling_to_plain(sampling: Sampling) -> list[Any]:
    """Sampling parameters as JSON."""
    return list(_get_sampling(sampling))


def sampling_from_plain(plain: Sequence[Any]) -> Sampling:
    """The parameters that `sampling_to_plain` encoded. Raises ValueError or TypeError for anything else."""
    return _SAMPLING.validate_python(dict(zip(_SAMPLING_FIELDS, plain, strict=True)))


def request_to_plain(
    ids: Sequence[int], sampling: Sampling, images: Sequence[Image], blobs: BlobStore
) -> dict[str, Any]:
    """A request to the engine as JSON."""
    request: dict[str, Any] = {"ids": pack_plain(ids, "i"), "sampling": sampling_to_plain(sampling)}
    if images:
        request["images"] = [[blobs.put(image.data), image.mime] for image in images]
    return request


def request_from_plain(
    plain: Mapping[str, Any], blobs: BlobStore, vocabulary: int
) -> tuple[tuple[int, ...], Sampling, tuple[Image, ...]]:
    """The ids, sampling and images of a request. Raises ValueError, TypeError or KeyError for anything else."""
    if not plain["ids"].startswith("plain:"):
        raise ValueError("a request has compressed ids")
    ids = unpack_array(plain["ids"], "i")
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(
            f"a request has ids from {min(ids)} to {max(ids)}; the model has those from 0 to {vocabulary - 1}"
        )
    images = tuple(Image(blobs.get(digest), str(mime)) for digest, mime in plain.get("images", ()))
    return ids, sampling_from_plain(plain["sampling"]), images


def generation_to_plain(generation: Generation) -> dict[str, Any]:
    """A generation as JSON."""
    return {
        "ids": pack_plain(generation.ids, "i"),
        "logprobs": pack_plain(generation.logprobs, "d"),
        "finish": generation.finish_reason,
        "version": generation.version,
        "cached": generation.cached_tokens,
        "earlier": generation.earlier_versions,
        "prompt": generation.prompt_tokens,
    }


def generation_from_plain(plain: Mapping[str, Any]) -> Generation:
    """The generation that `generation_to_plain` encoded."""
    return Generation(
        unpack_array(plain["ids"], "i"),
        unpack_array(plain["logprobs"], "d"),
        plain["finish"],
        plain["version"],
        plain["cached"],
        tuple((version, count) for version, count in plain["earlier"]),
        plain["prompt"],
    )
