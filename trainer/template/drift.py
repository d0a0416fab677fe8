"""At a rollout's end the template writes it all anew, and every difference from the ledger is told with its cause."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.types import ToolCall
from trainer.ledger import Author, Ledger
from trainer.parse.base import Reply

from .chat import Tool
from .errors import TemplateError
from .template import Sanity, Template
from .tokens import plain


class Cause(StrEnum):
    WHITESPACE = "whitespace"
    REASONING_STRIPPED = "reasoning_stripped"
    """The template writes earlier reasoning otherwise, or not at all: what `history` is about."""
    RETOKENISED = "retokenised"
    """The same text, which the tokenizer would cut otherwise than the policy did."""
    ARGUMENTS_REFORMATTED = "arguments_reformatted"
    """The same call in other words: the template writes JSON in its own way."""
    TRUNCATED = "truncated"
    """The policy did not come to the end of its turn."""
    END_TOKEN = "end_token"  # noqa: S105 -- the name of a cause
    """The policy ended its turn with another of its end tokens than the template does."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between what stands in a ledger and what the template would write."""

    cause: Cause
    expected: str
    got: str
    at: int
    """The place in the ledger's ids where the differing part begins."""

    @property
    def harmless(self) -> bool:
        """True where the policy's way of writing explains it: the ledger holds what it saw and wrote, as it should."""
        return self.cause not in (Cause.WHITESPACE, Cause.OTHER)

    def __str__(self) -> str:
        first = next((i for i, pair in enumerate(zip(self.expected, self.got, strict=False)) if pair[0] != pair[1]), 0)
        show = slice(max(0, first - 20), first + 60)
        return f"{self.cause} at token {self.at}: template {self.expected[show]!r}, ledger {self.got[show]!r}"


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a ledger's text, what the template wrote or one whole turn of the policy."""

    text: str
    at: int
    turn: bool
    stop: str | None = None


def drifts(
    template: Template, ledger: Ledger, tools: Sequence[Tool] = (), *, sanity: Sanity | None = None
) -> tuple[Drift, ...]:
    """How the ledger differs from a full render of its messages, as the setting `sanity` wants to hear it."""
    sanity = sanity or template.settings.sanity
    if sanity == "disable" or not ledger.entries:
        return ()
    waiting = ledger.entries[-1].author is not Author.POLICY
    try:
        shown = template.chat.text(ledger.messages, tools, prompt=waiting)
    except TemplateError as error:
        return (Drift(Cause.OTHER, str(error), template.tokens.decode(ledger.ids), 0),)
    found = tuple(_compared(_parts(template, ledger), plain(shown), template))
    if not found:
        found = tuple(_cut_otherwise(template, ledger, shown))
    if sanity == "ignore_strippable":
        found = tuple(drift for drift in found if drift.cause is not Cause.WHITESPACE)
    return found


def _parts(template: Template, ledger: Ledger) -> list[_Part]:
    """What a generation prompt opened (`<think>`) counts to the turn, for a template may take it back with it."""
    parts: list[_Part] = []
    at, carried = 0, ""
    for entry in ledger:
        text = template.tokens.decode(entry.ids)
        goes_on = bool(parts) and parts[-1].turn
        if entry.author is Author.POLICY or (goes_on and not entry.messages):
            # Text that a plug-in wrote into an unfinished turn is a part of that turn.
            before = parts.pop() if goes_on else _Part(carried, at, True)
            parts.append(_Part(before.text + text, before.at, True, entry.stop))
        else:
            own = text.removesuffix(template.opened)
            carried = text[len(own) :]
            parts.append(_Part(own, at, False))
        at += len(entry.ids)
    return parts


def _compared(parts: Sequence[_Part], shown: str, template: Template) -> Iterator[Drift]:
    place = 0
    for index, part in enumerate(parts):
        following = parts[index + 1].text if index + 1 < len(parts) else ""
        until = _until(part, following, shown, place)
        if until < 0:
            got = "".join(one.text for one in parts[index:])
            why = Cause.WHITESPACE if _squeezed(got) == _squeezed(shown[place:]) else Cause.OTHER
            yield Drift(why, shown[place:], got, part.at)
            return
        if part.turn and (cause := _cause(template, shown[place:until], part, last=not following)):
            yield Drift(cause, shown[place:until], part.text, part.at)
        place = until


def _until(part: _Part, following: str, shown: str, place: int) -> int:
    """Where the part ends in the template's text; -1 where it cannot be found there."""
    if shown.startswith(part.text + following, place):
        return len(shown) if part.turn and not following else place + len(part.text)
    if not part.turn:
        return place + len(part.text) if shown.startswith(part.text, place) else -1
    return shown.find(following, place) if following else len(shown)


def _cause(template: Template, expected: str, part: _Part, *, last: bool) -> Cause | None:
    """Why a turn differs; None where it does not."""
    wanted, got = body(template, expected), body(template, part.text)
    if expected == part.text or (last and wanted == got):
        return None
    if wanted == got:
        return Cause.END_TOKEN
    ours, theirs = template.parser.parse(got), template.parser.parse(wanted)
    if _squeezed(wanted) == _squeezed(got) and _texts(ours) == _texts(theirs):
        return Cause.WHITESPACE
    if part.stop not in (None, "stop"):
        return Cause.TRUNCATED
    if _squeezed(ours.content) != _squeezed(theirs.content) or _values(ours) != _values(theirs):
        return Cause.OTHER
    if _squeezed(ours.reasoning) != _squeezed(theirs.reasoning):
        return Cause.REASONING_STRIPPED
    if _texts(ours) == _texts(theirs) and _unthought(wanted) == _unthought(got):
        return Cause.REASONING_STRIPPED
    return Cause.ARGUMENTS_REFORMATTED if ours.calls else Cause.OTHER


def _cut_otherwise(template: Template, ledger: Ledger, shown: str) -> Iterator[Drift]:
    """The first id that the tokenizer would have put otherwise, where the text is the same."""
    ours = ledger.ids[:-1] if template.ended(ledger.ids) else ledger.ids
    theirs = template.tokens.encode(shown)
    if theirs[: len(ours)] == ours:
        return
    at = next(i for i, id in enumerate(ours) if theirs[i : i + 1] != (id,))
    decode = template.tokens.decode
    yield Drift(Cause.RETOKENISED, decode(theirs[at : at + 8]), decode(ours[at : at + 8]), at)


def body(template: Template, text: str) -> str:
    """A turn without its end-of-turn token and what stands after that."""
    for end in template.ends:
        if (cut := text.rstrip()).endswith(end):
            return cut.removesuffix(end)
    return text


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _unthought(text: str) -> str:
    """Without empty tags: some templates write an empty thought where there was none."""
    return _squeezed(re.sub(r"<(\w+)>\s*</\1>", "", text))


def _texts(reply: Reply) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in reply.calls]


def _values(reply: Reply) -> list[tuple[str, object]]:
    return [(call.name, value_of(call)) for call in reply.calls]


def value_of(call: ToolCall) -> object:
    """A call's arguments as data, or as they stand where they are no JSON."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments
