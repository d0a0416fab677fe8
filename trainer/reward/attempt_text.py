"""The text of a rollout as it was written: decoded from its ids, never rebuilt from parsed messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from gateway.feedback.base import plain_text
from trainer.ledger import Author, Ledger, Message
from trainer.rollout.rollout import Rollout


class Decoder(Protocol):
    """The part of a chat template that turns ids into text."""

    prefill: str

    def decode_turn(self, ids: Sequence[int]) -> str: ...
    def decode_without_special(self, ids: Sequence[int]) -> str: ...


def response_ids(rollout: Rollout) -> tuple[list[int], list[int]]:
    """All ids after the prompt, of the policy and of tools and feedback, and the mask that is 1 for the policy's."""
    ids: list[int] = []
    mask: list[int] = []
    for ledger in rollout.ledgers:
        for entry in ledger.entries[1:]:
            ids += entry.ids
            mask += [int(entry.author is Author.POLICY)] * len(entry.ids)
    return ids, mask


def verbatim_messages(rollout: Rollout, decoder: Decoder) -> list[dict[str, Any]]:
    """The chat as text, with each turn of the policy as it was written, markup and all, beside its parsed calls."""
    turns = [turn for ledger in rollout.ledgers for turn in _turns(ledger, decoder)]
    return [_with_text(message, turns) for message in rollout.ledger.messages]


def _turns(ledger: Ledger, decoder: Decoder) -> Iterator[tuple[Message, str]]:
    """Each turn's message with its text, including a prefill and what a plug-in inserted into the turn."""
    prompt: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()
    for entry in ledger:
        if entry.author is not Author.POLICY and (entry.messages or not turn):
            prompt, turn = entry.ids, ()
            continue
        turn += entry.ids
        if entry.author is Author.POLICY and entry.messages:
            prefill = decoder.prefill if decoder.decode_turn(prompt).endswith(decoder.prefill) else ""
            yield entry.messages[-1], prefill + decoder.decode_turn(turn)
            turn = ()


def _with_text(message: Message, turns: Sequence[tuple[Message, str]]) -> dict[str, Any]:
    """A message with its text as content. Turns that a later ledger's prompt repeats are found by their message."""
    fields = {key: value for key, value in message.items() if key != "reasoning_content"}
    text = next((text for turn, text in turns if turn is message or turn == message), None)
    if text is None:
        reasoning, content = message.get("reasoning_content"), plain_text(message.get("content"))
        text = f"<think>{reasoning}</think>{content}" if reasoning else content
    return fields | {"content": text}
