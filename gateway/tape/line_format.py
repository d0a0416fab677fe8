"""The JSON lines of a tape, and the digests by which a request is found again.

Media are stored beside the lines under the digest of their bytes. A request is identified by its content and by the
earlier requests of its session, never by time or call id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

from gateway.argument_checks import MAX_LENGTH, MAX_VALUES
from gateway.types import Audience, Feedback, Json, Outcome, Task, ToolCall, ToolResult
from gateway.wire import part_from_json, part_to_json, to_plain

FORMAT = 2
"""The version of the format. Readers reject any other; raise it when an older reader would misread a new tape."""

TapeLine = dict[str, Any]
Answer = ToolResult | Feedback
AnswerT = TypeVar("AnswerT", ToolResult, Feedback)


def encode_answer(answer: Answer, blobs: dict[str, bytes]) -> TapeLine:
    """The answer as JSON; the bytes of its media are put into `blobs`."""

    def put(data: bytes) -> str:
        blobs[digest := sha256(data).hexdigest()] = data
        return digest

    return _encode_fields(answer, exclude="parts") | {"parts": [part_to_json(part, put) for part in answer.parts]}


def decode_result(line: TapeLine, read_blob: Callable[[str], bytes]) -> ToolResult:
    """The tool result in an answer."""
    return ToolResult(**_decode_fields(line, read_blob))


def decode_feedback(line: TapeLine, read_blob: Callable[[str], bytes]) -> Feedback:
    """The feedback in an answer."""
    return Feedback(**_decode_fields(line, read_blob))


def blob_digests(line: TapeLine) -> list[str]:
    """The digests of the blobs that an answer refers to."""
    return [part["data"] for part in line["parts"] if "data" in part]


OMITTED_IF_EMPTY = ("rollout", "state", "hash_state")
"""Fields that a task on a tape has only where it uses them."""


def encode_task(task: Task) -> TapeLine:
    """A task as JSON, without its session's id. An empty rollout is omitted: siblings are then distinguished by their
    requests."""
    encoded = _encode_fields(task, "session_id")
    return {name: value for name, value in encoded.items() if name not in OMITTED_IF_EMPTY or value}


def _decode_fields(line: TapeLine, read_blob: Callable[[str], bytes]) -> TapeLine:
    parts = tuple(part_from_json(part, read_blob) for part in line["parts"])
    return line | {"parts": parts, "outcome": Outcome(line["outcome"])}


def _encode_fields(value: Any, exclude: str = "") -> TapeLine:
    return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.name != exclude}


class RequestKey(NamedTuple):
    """Identifies a request on a tape."""

    after: str
    """Digest of the task and of all requests before this message."""
    request: str
    """Digest of the request itself."""
    nth: int
    """Its position among equal requests of one message."""


class RequestHistory:
    """A running digest of one session's requests, so that late calls cost no more than early ones."""

    __slots__ = ("count", "digest")

    def __init__(self, task: Task) -> None:
        self.digest = digest_task(encode_task(task))
        self.count = 0

    def keys(self, requests: Sequence[str]) -> list[RequestKey]:
        """The keys of one message's requests. They share `after`, so the order of the answers does not matter."""
        counts: Counter[str] = Counter()
        keys = []
        for request in requests:
            keys.append(RequestKey(self.digest, request, counts[request]))
            counts[request] += 1
        return keys

    def add(self, requests: Sequence[str]) -> None:
        """Adds one message's requests."""
        for request in requests:
            self.digest = sha256((self.digest + request).encode()).hexdigest()
        self.count += len(requests)


def canonical_json(value: Json) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"))


def digest_json(value: Json) -> str:
    """The digest of a JSON value."""
    return sha256(canonical_json(value).encode()).hexdigest()


def digest_task(line: TapeLine) -> str:
    """The digest of a task, ignoring its time to live and the order of its tools."""
    tools = line["tools"] if line["tools"] is None else sorted(line["tools"])
    return digest_json({**line, "tools": tools, "ttl_s": None})


def digest_call(call: ToolCall, audience: Audience) -> str:
    """The digest of a tool call; its id does not count."""
    return digest_json(["call", call.name, normalize_arguments(call.arguments), audience])


def digest_feedback(messages: Sequence[Mapping[str, Any]]) -> str:
    """The digest of a feedback request."""
    return digest_json(["feedback", messages])


FINISH_DIGEST = digest_json(["finish"])


def normalize_arguments(arguments: str) -> tuple[str, str]:
    """The arguments as canonical JSON if they are JSON, else as their text; also if they are too large to be called."""
    if len(arguments) > MAX_LENGTH or arguments.count(",") > 2 * MAX_VALUES:
        return "text", arguments
    try:
        value = json.loads(arguments or "{}")
        return "json", json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "text", arguments
