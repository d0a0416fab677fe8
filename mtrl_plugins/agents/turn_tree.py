"""The policy's turns of one rollout as a tree: a chat that an agent sends goes on from the turn whose ids are known.

Ids of known turns are taken as they were sampled; nothing that the policy wrote is encoded again. Messages are compared
by meaning: agents rewrite what they send back, such as the JSON of a call's arguments.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b, sha256
from typing import Any

from gateway.types import Audio, Image, Video
from mtrl_plugins.agents.requests import ReadMessage
from trainer.ledger import Entry, Ledger, Message
from trainer.rollout.ledger_builder import as_context
from trainer.rollout.rollout import CHANGED_BY_AGENT

ROLES = {"developer": "system"}
"""Roles that mean another one."""
TOOL_CALLS = "tool_calls"


class Change(StrEnum):
    """How an agent changed what the policy had written before it sent it back."""

    WHITESPACE = "whitespace"
    ARGUMENTS = "arguments"
    """The JSON of a call's arguments was written anew."""
    REASONING = "reasoning"
    """The reasoning was dropped, or is another."""
    CALL_IDS = "call_ids"
    HISTORY = "history"
    """A message was edited, added or removed, so that the prompt is a new one."""
    TOOLS = "tools"
    """The same chat came with other tools, so that the prompt is a new one."""


def message_key(message: Message) -> bytes:
    """A digest of a message's meaning: ids of calls, reasoning and outer white space do not count."""
    if not isinstance(message, ReadMessage):
        return _make_key(message)
    if not hasattr(message, "key"):
        message.key = _make_key(message)
    return message.key


def _make_key(message: Message) -> bytes:
    calls = [
        (call["function"]["name"], _canonical_json(call["function"].get("arguments")))
        for call in message.get(TOOL_CALLS) or ()
    ]
    role = message["role"]
    meaning = (ROLES.get(role, role), _content_key(message.get("content")), calls)
    return blake2b(repr(meaning).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """A digest of the offered tools, in their order."""
    return blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()


def extend_key(key: bytes, more: bytes) -> bytes:
    """The digest of a history that goes on by one message."""
    return blake2b(key + more, digest_size=16).digest()


def find_changes(written: Message, sent_back: Message) -> list[Change]:
    """The differences between the policy's turn, as the agent was given it, and what the agent made of it."""
    changes = []
    if (written.get("content") or "") != _plain(sent_back.get("content")):
        changes.append(Change.WHITESPACE)
    pairs = list(zip(written.get(TOOL_CALLS) or (), sent_back.get(TOOL_CALLS) or (), strict=False))
    if any(one["function"]["arguments"] != other["function"].get("arguments") for one, other in pairs):
        changes.append(Change.ARGUMENTS)
    if any(one["id"] != other.get("id") for one, other in pairs):
        changes.append(Change.CALL_IDS)
    if (written.get("reasoning_content") or "") != (sent_back.get("reasoning_content") or ""):
        changes.append(Change.REASONING)
    return changes


def _canonical_json(arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        value = json.loads(text or "{}", parse_int=_read_number, parse_float=_read_number)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _read_number(text: str) -> float | int:
    """A number as JavaScript reads it, in which many agents are written: `3.0` is 3, and large integers are rounded."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _content_key(content: Any) -> Any:
    """A text, or a list of texts and digests of media."""
    if not isinstance(content, list):
        return (content or "").strip()
    parts = [_part_key(part) for part in content]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts).strip()
    return [part for part in parts if part]


def _part_key(part: Mapping[str, Any]) -> Any:
    if part.get("type") == "text":
        return str(part["text"]).strip()
    medium = part.get(str(part.get("type")))
    if isinstance(medium, Image | Audio | Video):
        return blake2b(medium.data, digest_size=16).digest()
    return json.dumps(part, sort_keys=True, default=str)


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""


MAX_SENT_BACK = 20_000
"""The longest message, in characters of JSON, that is kept as the agent sent it back."""


@dataclass(eq=False, slots=True)
class PolicyTurn:
    """One turn: what came before it, and what the policy wrote."""

    parent: PolicyTurn | None
    prompt: Entry
    """What was rendered between the parent, or the start, and this turn."""
    entry: Entry
    message: Message
    """The turn as the agent was given it."""
    tools: bytes
    """The digest of the tools that were offered."""
    ended: bool
    """Whether the policy ended the turn itself."""
    key: bytes = b""
    """The digest of the chat up to here."""
    changes: set[Change] = field(default_factory=set)
    """The changes in this turn that were counted."""
    sent_back: Message | None = None
    """The turn as the agent sent it back, if it changed it."""
    compared: Message | None = None
    """The message as which it came back last."""

    @property
    def path(self) -> list[PolicyTurn]:
        """The turns from the start to this one."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent  # type: ignore[assignment]
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a chat goes on."""

    parent: PolicyTurn | None
    """The latest known turn; None if the whole chat has to be rendered."""
    rest: tuple[Message, ...]
    """The messages after it."""
    key: bytes
    """The digest of the whole chat."""


class TurnTree:
    """The turns of one rollout."""

    def __init__(self) -> None:
        self.turns: list[PolicyTurn] = []
        """In the order in which they were written."""
        self.added = 0
        """How many turns were ever added."""
        self.changed: Counter[Change] = Counter()
        """What the agent changed: messages by kind of change."""
        self._by_key: dict[bytes, list[PolicyTurn]] = {}
        self._openings: dict[bytes, bytes] = {}
        """The tools that came with each beginning of a chat, up to its first question."""
        self._answered: set[bytes] = set()
        """The beginnings that were rendered."""

    def find(self, messages: Sequence[Message], tools: bytes, *, counts: bool = True) -> Continuation:
        """Finds the longest known beginning of a chat that ends with a turn of the policy.

        What the agent changed is counted, unless nothing is generated.
        """
        key, turns, known = tools, list[PolicyTurn](), 0
        for index, message in enumerate(messages, 1):
            key = extend_key(key, message_key(message))
            if message["role"] == "assistant" and key in self._by_key:
                turns, known = self._by_key[key], index
        parent = _choose(turns, messages[known - 1]) if turns else None
        rest = tuple(messages[known:])
        if any(message["role"] == "assistant" for message in rest):  # Only whole chats hold turns of others.
            parent, rest = None, tuple(messages)
        if parent is None:
            if counts:
                self._count_new_history(messages, tools)
            return Continuation(None, rest, key)
        if counts:
            self._count_changes(parent, messages[:known])
        return Continuation(parent, _restore_call_ids(parent, messages[known - 1], rest), key)

    def add(self, turn: PolicyTurn, chat: Continuation) -> None:
        """Adds a turn that answers the chat."""
        turn.key = extend_key(chat.key, message_key(turn.message))
        self.turns.append(turn)
        self.added += 1
        self._by_key.setdefault(turn.key, []).append(turn)

    def ledgers(self) -> list[Ledger]:
        """A ledger for each branch, the main one last. Each turn is the policy's in the first ledger that has it.

        In further ledgers it is part of the prompt, so that every sampled token is trained once.
        """
        parents = {id(turn.parent) for turn in self.turns}
        leaves = [turn for turn in self.turns if id(turn) not in parents]
        if not leaves:
            return [Ledger()]
        order = {id(turn): index for index, turn in enumerate(self.turns)}
        main = max(leaves, key=lambda leaf: (len(leaf.path), order[id(leaf)]))
        seen: set[int] = set()
        return [_make_ledger(leaf, seen) for leaf in [*(leaf for leaf in leaves if leaf is not main), main]]

    def _count_changes(self, parent: PolicyTurn, messages: Sequence[Message]) -> None:
        """Counts each change of a turn once, however often the chat is sent."""
        sent_back = [message for message in messages if message["role"] == "assistant"]
        path = parent.path
        for turn, message in zip(reversed(path), reversed(sent_back), strict=False):
            if message is turn.compared:
                continue
            turn.compared = message
            new = set(find_changes(turn.message, message)) - turn.changes
            turn.changes |= new
            turn.sent_back = message if new else turn.sent_back
            self.changed.update(new)

    def _count_new_history(self, messages: Sequence[Message], tools: bytes) -> None:
        """Counts a chat that begins like an earlier one, but does not go on from the policy's turns in it."""
        opening = b""
        for message in messages:
            opening = extend_key(opening, message_key(message))
            if message["role"] == "user":
                break
        before = self._openings.setdefault(opening, tools)
        if before != tools:
            self.changed[Change.TOOLS] += 1
        elif opening in self._answered and any(message["role"] == "assistant" for message in messages):
            self.changed[Change.HISTORY] += 1
        self._answered.add(opening)


def _choose(turns: Sequence[PolicyTurn], sent_back: Message) -> PolicyTurn:
    """Of turns with the same meaning the one that came back with the fewest changes, or else the newest."""
    if len(turns) == 1:
        return turns[0]
    return min(reversed(turns), key=lambda turn: len(find_changes(turn.message, sent_back)))


def _restore_call_ids(parent: PolicyTurn, sent_back: Message, rest: tuple[Message, ...]) -> tuple[Message, ...]:
    """The answers to calls, under the ids that the calls have here."""
    own = [call["id"] for call in parent.message.get(TOOL_CALLS) or ()]
    theirs = [call.get("id") for call in sent_back.get(TOOL_CALLS) or ()]
    names = {other: id for id, other in zip(own, theirs, strict=False) if id != other}
    if not names:
        return rest
    return tuple(
        {**message, "tool_call_id": names.get(message.get("tool_call_id"), message.get("tool_call_id"))}
        if message["role"] == "tool"
        else message
        for message in rest
    )


def match_results(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages; a result without an id answers the first open call of its name, or else the first open one."""
    waiting: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            waiting = {call["id"]: call["function"]["name"] for call in message.get(TOOL_CALLS, ())}
        elif message["role"] == "tool":
            if "name" in message:
                named = (id for id, name in waiting.items() if name == message["name"])
                id, key = next(named, next(iter(waiting), "")), message_key(message)
                message = ReadMessage(role="tool", tool_call_id=id, content=message["content"])
                message.key = key  # Ids do not count.
            waiting.pop(message["tool_call_id"], None)
        yield message


def _make_ledger(leaf: PolicyTurn, seen: set[int]) -> Ledger:
    entries: list[Entry] = []
    for turn in leaf.path:
        is_known = id(turn) in seen
        seen.add(id(turn))
        known = replace(as_context(turn.entry), experts=turn.entry.experts)  # As the turns after it were asked for.
        entries += [turn.prompt, known if is_known else _with_changes(turn)]
    return Ledger(tuple(entries))


def _with_changes(turn: PolicyTurn) -> Entry:
    """The turn's entry with what the agent changed in it, for those who look at the rollout."""
    if not turn.changes:
        return turn.entry
    info: dict[str, object] = {**turn.entry.info, CHANGED_BY_AGENT: sorted(map(str, turn.changes))}
    if len(json.dumps(turn.sent_back)) <= MAX_SENT_BACK:
        info["sent_back"] = turn.sent_back
    return replace(turn.entry, info=info)


KEPT = 4
"""The latest branches are kept; each holds all its ids once."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    turn: PolicyTurn
    ledger: Ledger
    hasher: Any
    """Of the ledger's ids."""


class LedgerPrefixes:
    """The ledgers of one rollout's tree, up to a turn."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Prefix] = OrderedDict()
        """By the turn's `id`; the turn is held, so that no other can have it."""

    def find(self, turn: PolicyTurn | None) -> Ledger:
        """The ledger up to a turn; an empty one for None."""
        return self._find(turn).ledger if turn else Ledger()

    def digest(self, turn: PolicyTurn | None, entry: Entry) -> bytes:
        """A digest of the ids up to a turn and an entry after it."""
        hasher = self._find(turn).hasher.copy() if turn else sha256()
        hasher.update(_to_bytes(entry))
        digest: bytes = hasher.digest()
        return digest

    def add(self, turn: PolicyTurn, ledger: Ledger) -> None:
        """Keeps the ledger up to a new turn."""
        before = self._kept.get(id(turn.parent))
        if turn.parent is not None and before is None:
            return
        self._keep(turn, ledger, before.hasher.copy() if before else sha256(), (turn.prompt, turn.entry))

    def _find(self, turn: PolicyTurn) -> _Prefix:
        if id(turn) in self._kept:
            self._kept.move_to_end(id(turn))
            return self._kept[id(turn)]
        entries = tuple(entry for one in turn.path for entry in (one.prompt, one.entry))
        return self._keep(turn, Ledger(entries), sha256(), entries)

    def _keep(self, turn: PolicyTurn, ledger: Ledger, hasher: Any, new: tuple[Entry, ...]) -> _Prefix:
        for entry in new:
            hasher.update(_to_bytes(entry))
        self._kept[id(turn)] = prefix = _Prefix(turn, ledger, hasher)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return prefix


def _to_bytes(entry: Entry) -> bytes:
    return array("q", entry.ids).tobytes()
