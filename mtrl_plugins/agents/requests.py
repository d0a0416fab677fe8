"""A request to the policy in one form for all protocols, the answer to it, and how fields of protocols are read."""

from __future__ import annotations

import marshal
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs

from starlette.types import Scope

from gateway.media.sniff import MediaError, media_from_data_uri
from gateway.types import EMPTY, Image, ToolCall
from trainer.ledger import Message

FinishReason = Literal["stop", "length", "tool_calls"]
ProblemKind = Literal[
    "invalid_request", "unsupported", "context_length", "not_found", "unauthorized", "ended", "too_large", "unavailable"
]
STATUS: Mapping[str, int] = {
    "invalid_request": 400,
    "unsupported": 400,
    "context_length": 400,
    "unauthorized": 401,
    "not_found": 404,
    "ended": 410,
    "too_large": 413,
    "unavailable": 503,
}
"""The HTTP status of each kind of problem."""


class PolicyProblem(Exception):
    """A request that is not served; each protocol writes it in its own form."""

    def __init__(self, kind: ProblemKind, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.param = kind, message, param

    @property
    def status(self) -> int:
        return STATUS[self.kind]


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """What an agent asks the policy."""

    messages: tuple[Message, ...]
    """The chat as templates take it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """OpenAI function schemas."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    parallel_calls: bool = True
    stream: bool = False
    logprobs: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """What only its own protocol needs for the answer."""
    asked_form: bool = False
    """Whether a call, or a form of the text, was asked for. The policy samples freely all the same: what a grammar
    forced would be other tokens than those that it learns from."""


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """The policy's turn for the agent."""

    id: str
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_sequence: str | None = None
    """The stop string of the request that ended the turn."""
    tokens: tuple[tuple[str, float], ...] = ()
    """The text and the logprob of each sampled token, if they were asked for."""


@dataclass(frozen=True, slots=True)
class TurnStart:
    """What is known before a turn is sampled."""

    id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """What was added to a turn."""

    content: str = ""
    reasoning: str = ""


def require(condition: object, message: str, param: str) -> None:
    """Raises a problem with a field of the request unless the condition holds."""
    if not condition:
        raise PolicyProblem("invalid_request", message, param=param)


def refuse(condition: object, message: str, param: str) -> None:
    """Raises a problem if a field asks for what is not supported."""
    if condition:
        raise PolicyProblem("unsupported", message, param=param)


def asks_form(choice: Any, kind: Any) -> bool:
    """Whether a `tool_choice` forces a call, or the kind of a format is another than text."""
    require(choice is None or isinstance(choice, str | Mapping), "must be a text or an object", "tool_choice")
    return choice not in (None, "auto", "none") or kind not in (None, "text")


def read_integer(body: Mapping[str, Any], name: str) -> int | None:
    """A positive integer; None if it is missing."""
    value = body.get(name)
    is_integer = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(value is None or is_integer, "must be a positive integer", name)
    return value


def read_number(body: Mapping[str, Any], name: str) -> float | None:
    """A number from 0 on; None if it is missing."""
    value = body.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1000
    require(value is None or is_number, "must be a number from 0 on", name)
    return value


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; an empty one if it is missing."""
    value = body.get(name)
    require(value is None or isinstance(value, Mapping), "must be an object", name)
    return EMPTY if value is None else value


def read_list(body: Mapping[str, Any], name: str) -> list[Any]:
    """A list; an empty one if it is missing."""
    value = body.get(name)
    require(value is None or isinstance(value, list), "must be a list", name)
    return value or []


def read_text(body: Mapping[str, Any], name: str) -> str:
    """A text; an empty one if it is missing."""
    value = body.get(name, "")
    require(isinstance(value, str), "must be a text", name)
    return str(value)


def read_query(scope: Scope, name: str) -> str:
    """A field of the query in a request's address; an empty one if it is missing."""
    query: str = scope.get("query_string", b"").decode("latin-1")
    return parse_qs(query).get(name, [""])[0]


MOST_TEXTS, LONGEST_TEXT = 16, 200
"""Each is looked for after every token."""


def read_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A few short texts that are not empty: a list of them, or a single one."""
    value = body.get(name)
    texts = value if isinstance(value, list) else [] if value in (None, "") else [value]
    is_valid = all(isinstance(text, str) and text for text in texts)
    require(is_valid, "must be a text or a list of texts", name)
    is_short = len(texts) <= MOST_TEXTS and all(len(text) <= LONGEST_TEXT for text in texts)
    require(is_short, f"may be {MOST_TEXTS} texts of {LONGEST_TEXT} characters at most", name)
    return tuple(texts)


Content = str | list[dict[str, Any]]
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "summary_text", "refusal"})
_IMAGE_TYPES = frozenset({"image_url", "input_image"})


def read_content(content: Any, where: str) -> Content:
    """The content for a template; parts of text alone become one text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    require(isinstance(content, list), "must be text or a list of parts", where)
    parts = [read_part(part, f"{where}.{index}") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def read_part(part: Any, where: str) -> dict[str, Any]:
    """One part of a message."""
    require(isinstance(part, Mapping), "must be an object", where)
    kind = part.get("type")
    if kind in _TEXT_TYPES:
        text = part.get("text", part.get("refusal"))
        require(isinstance(text, str), "needs a text", where)
        return {"type": "text", "text": text}
    refuse(kind not in _IMAGE_TYPES, f"parts of type {kind!r} are not supported", where)
    url = part.get("image_url")
    return make_image(url.get("url") if isinstance(url, Mapping) else url, where)


def make_image(uri: Any, where: str) -> dict[str, Any]:
    """An image from a data URI. Nothing is fetched: an address could be one of this machine."""
    refuse(
        not (isinstance(uri, str) and uri.startswith("data:")),
        "images must be data URIs (`data:image/png;base64,...`): addresses are not fetched",
        where,
    )
    try:
        image = media_from_data_uri(uri)
    except (MediaError, ValueError) as error:
        raise PolicyProblem("invalid_request", f"is no image: {error}", param=where) from error
    require(isinstance(image, Image), "is no image", where)
    return {"type": "image", "image": image}


Read = Callable[[Any, str], Iterable[Message]]
"""Reads a protocol's message; its place is for errors."""


MOST_BYTES = 64 * 1024 * 1024
"""Of one session; beyond that it begins anew."""


class ReadMessage(dict[str, Any]):
    """A message that a session keeps, with its digest once that was needed."""

    __slots__ = ("key",)
    key: bytes


class MessageCache:
    """The messages that one session has read, by what was sent."""

    def __init__(self) -> None:
        self._messages: dict[bytes, tuple[Message, ...]] = {}
        self._size = 0

    def read_all(self, sent: Sequence[Any], name: str, read: Read) -> Iterator[Message]:
        """The messages of a list. Those that were read before are the same objects."""
        for index, one in enumerate(sent):
            place = f"{name}.{index}"
            try:
                known = marshal.dumps(one, 2)
            except ValueError:  # An image that was decoded already.
                yield from map(ReadMessage, read(one, place))
                continue
            if known not in self._messages:
                if self._size + len(known) > MOST_BYTES:
                    self.clear()
                self._size += len(known)
                self._messages[known] = tuple(map(ReadMessage, read(one, place)))
            yield from self._messages[known]

    def clear(self) -> None:
        """Forgets all messages."""
        self._messages.clear()
        self._size = 0


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
