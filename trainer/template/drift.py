"""Finds differences between a ledger and the template's rendering of its messages, with the cause of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainer.ledger import BRANCH, Author, Ledger
from trainer.parse.base import Reply
from trainer.template.chat_template import Tool
from trainer.template.difference import mark_difference
from trainer.template.errors import TemplateError
from trainer.template.template import Sanity, Template
from trainer.template.tokenizer import strip_fences


class Cause(StrEnum):
    """Why a ledger differs from the template's rendering."""

    WHITESPACE = "whitespace"
    REASONING_STRIPPED = "reasoning_stripped"
    """The template changes or drops earlier reasoning; see the setting `history`."""
    EMPTY_REASONING = "empty_reasoning"
    """The prompt switches reasoning off by an empty block of it, which the template drops from earlier turns."""
    RETOKENISED = "retokenised"
    """The text is the same, but the tokenizer would split it differently."""
    ARGUMENTS_REFORMATTED = "arguments_reformatted"
    """The call is the same, but the template formats JSON differently."""
    EXTRA_CALLS = "extra_calls"
    """The policy wrote more calls in a turn than are made, which the template leaves out; see `parallel_calls`."""
    TRUNCATED = "truncated"
    """The policy did not finish its turn."""
    END_TOKEN = "end_token"  # noqa: S105 -- the name of a cause
    """The policy ended its turn with another end token."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Drift:
    """A difference between a ledger and the template's rendering."""

    cause: Cause
    expected: str
    got: str
    token: int
    """The index of the differing part's first token in the ledger."""

    @property
    def is_harmless(self) -> bool:
        """True if the policy's own way of writing explains it: the ledger is what the policy saw and wrote."""
        return self.cause not in (Cause.WHITESPACE, Cause.OTHER)

    def __str__(self) -> str:
        texts = mark_difference("the template", self.expected, "the rollout", self.got)
        return f"{self.cause} at token {self.token}:{texts}"


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a ledger's text: one turn of the policy, or text of the template."""

    text: str
    token: int
    is_turn: bool
    finish_reason: str | None = None


def find_drifts(
    template: Template, ledger: Ledger, tools: Sequence[Tool] = (), *, sanity: Sanity | None = None
) -> tuple[Drift, ...]:
    """The differences from a full rendering of the ledger's messages that the setting `sanity` reports."""
    sanity = sanity or template.settings.sanity
    if sanity == "disable" or not ledger.entries:
        return ()
    needs_prompt = ledger.entries[-1].author is not Author.POLICY
    try:
        rendered = template.chat.render(ledger.messages, tools, add_generation_prompt=needs_prompt)
    except TemplateError as error:
        return (Drift(Cause.OTHER, str(error), template.tokenizer.decode(ledger.ids), 0),)
    ids = template.tokenizer.encode(rendered)
    rest = strip_end_token(template, template.tokenizer.decode(ids[len(ledger) :]))
    is_whole = not rest or (template.is_turn_ended(ledger.ids) and not rest.strip())
    if ids[: len(ledger)] == ledger.ids and is_whole:
        return ()  # Nearly always, and then no part has to be decoded and compared.
    drifts = tuple(_compare(_split_into_parts(template, ledger), strip_fences(rendered), template))
    if not drifts:
        drifts = tuple(_compare_tokens(template, ledger, ids))
    if sanity == "ignore_strippable":
        drifts = tuple(drift for drift in drifts if drift.cause is not Cause.WHITESPACE)
    return drifts


def _split_into_parts(template: Template, ledger: Ledger) -> list[_Part]:
    """The parts of the ledger's text. A prefill such as `<think>` counts to the turn, as templates may drop both."""
    parts: list[_Part] = []
    token, prefill = 0, ""
    for entry in ledger:
        text = template.tokenizer.decode(entry.ids)
        continues_turn = bool(parts) and parts[-1].is_turn
        is_turn = entry.author is Author.POLICY or entry.source == BRANCH
        if is_turn or (continues_turn and not entry.messages):
            # Text that a plug-in inserted into an unfinished turn is part of that turn.
            before = parts.pop() if continues_turn else _Part(prefill, token, True)
            parts.append(_Part(before.text + text, before.token, True, entry.finish_reason))
        else:
            without_prefill = text.removesuffix(template.prefill)
            prefill = text[len(without_prefill) :]
            parts.append(_Part(without_prefill, token, False))
        token += len(entry.ids)
    return parts


def _compare(parts: Sequence[_Part], rendered: str, template: Template) -> Iterator[Drift]:
    start = 0
    for index, part in enumerate(parts):
        following = parts[index + 1].text if index + 1 < len(parts) else ""
        end = _find_end(part, following, rendered, start)
        if end < 0:
            got = "".join(part.text for part in parts[index:])
            same = _remove_space(got) == _remove_space(rendered[start:])
            yield Drift(Cause.WHITESPACE if same else Cause.OTHER, rendered[start:], got, part.token)
            return
        if part.is_turn and (cause := _find_cause(template, rendered[start:end], part, is_last=not following)):
            yield Drift(cause, rendered[start:end], part.text, part.token)
        start = end


def _find_end(part: _Part, following: str, rendered: str, start: int) -> int:
    """The end of the part in the rendered text; -1 if it is not found."""
    if rendered.startswith(part.text + following, start):
        return len(rendered) if part.is_turn and not following else start + len(part.text)
    if not part.is_turn:
        return start + len(part.text) if rendered.startswith(part.text, start) else -1
    return rendered.find(following, start) if following else len(rendered)


def _find_cause(template: Template, expected: str, part: _Part, *, is_last: bool) -> Cause | None:
    """Why a turn differs; None if it does not."""
    expected_body, got_body = strip_end_token(template, expected), strip_end_token(template, part.text)
    if expected == part.text or (is_last and expected_body == got_body):
        return None
    if expected_body == got_body:
        return Cause.END_TOKEN
    got_reply, expected_reply = template.parser.parse(got_body), template.parser.parse(expected_body)
    same_calls = _call_texts(got_reply) == _call_texts(expected_reply)
    if _remove_space(expected_body) == _remove_space(got_body) and same_calls:
        return Cause.WHITESPACE
    if part.finish_reason not in (None, "stop"):
        return Cause.TRUNCATED
    if _remove_space(got_reply.content) != _remove_space(expected_reply.content):
        return Cause.OTHER
    got_calls, expected_calls = _call_values(got_reply), _call_values(expected_reply)
    if got_calls != expected_calls:
        # Every rollout makes at least one call of a turn.
        is_start = bool(expected_calls) and got_calls[: len(expected_calls)] == expected_calls
        return Cause.EXTRA_CALLS if is_start else Cause.OTHER
    if _remove_space(got_reply.reasoning) != _remove_space(expected_reply.reasoning):
        return Cause.REASONING_STRIPPED
    if same_calls and _remove_empty_tags(expected_body) == _remove_empty_tags(got_body):
        return Cause.REASONING_STRIPPED if got_reply.reasoning else Cause.EMPTY_REASONING
    return Cause.ARGUMENTS_REFORMATTED if got_reply.calls else Cause.OTHER


def _compare_tokens(template: Template, ledger: Ledger, expected: tuple[int, ...]) -> Iterator[Drift]:
    """The first id that the tokenizer would choose differently for the same text."""
    got = ledger.ids[:-1] if template.is_turn_ended(ledger.ids) else ledger.ids
    if expected[: len(got)] == got:
        return
    token = next(index for index, id in enumerate(got) if expected[index : index + 1] != (id,))
    decode = template.tokenizer.decode
    yield Drift(Cause.RETOKENISED, decode(expected[token : token + 8]), decode(got[token : token + 8]), token)


def strip_end_token(template: Template, text: str) -> str:
    """A turn without its end token and white space after that; some templates end the last turn with two."""
    for _ in range(template.end_count):
        end = next((end for end in template.end_tokens if text.rstrip().endswith(end)), None)
        text = text if end is None else text.rstrip().removesuffix(end)
    return text


def _remove_space(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _remove_empty_tags(text: str) -> str:
    """Without empty tags: some templates write an empty thought if there was none."""
    return _remove_space(re.sub(r"<(\w+)>\s*</\1>", "", text))


def _call_texts(reply: Reply) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in reply.calls]


def _call_values(reply: Reply) -> list[tuple[str, object]]:
    return [(call.name, parse_arguments(call.arguments)) for call in reply.calls]


def parse_arguments(arguments: Any) -> Any:
    """A call's arguments as data, or as text if they are not JSON."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
