"""What a scheduler made of its chat is seen in the chat: a new round, the turn going on, or another history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trainer.ledger import Author
from trainer.steps import Step
from trainer.swift.chat import laid_out, parted
from trainer.swift.protocol import Messages, RolloutInferRequest


@dataclass(frozen=True)
class Known:
    """The chat as the scheduler left it, and what the policy wrote in it since."""

    chat: Messages
    images: int
    begun: str = ""
    """Of the policy's turn, what stood there before it wrote."""
    said: str = ""
    ids: tuple[int, ...] = ()
    """Of `said`; its end, if it has one, is not among them."""

    @property
    def turn(self) -> str:
        return self.begun + self.said

    @property
    def whole(self) -> Messages:
        return [*deepcopy(self.chat), {"role": "assistant", "content": self.turn}]


def opened(request: RolloutInferRequest) -> tuple[Known, Step]:
    """The policy sees this chat, and nothing of an earlier one."""
    chat, begun = parted(request.messages)
    step = Step(history=laid_out(chat, request.images), insert=begun)
    return Known(deepcopy(chat), len(request.images), begun), step


def next_step(known: Known, request: RolloutInferRequest, words: Callable[[Sequence[int]], str]) -> tuple[Known, Step]:
    """What is known from here on, and what the policy reads; `words` are those of ids."""
    at = len(known.chat)
    chat = _without_dummies(request.messages)
    own = chat[at].get("content") if len(chat) > at and chat[at].get("role") == "assistant" else None
    if chat[:at] != known.chat or not isinstance(own, str):
        return opened(request)
    rest = chat[at + 1 :]
    if not rest:
        return _going_on(known, own, request, words)
    new, begun = parted(rest)
    if not new or own.strip() != known.turn.strip():
        return opened(request)
    step = Step(messages=laid_out(new, request.images[known.images :]), insert=begun)
    return Known(deepcopy([*chat[: at + 1], *new]), len(request.images), begun), step


def _going_on(
    known: Known, own: str, request: RolloutInferRequest, words: Callable[[Sequence[int]], str]
) -> tuple[Known, Step]:
    if not own.startswith(known.begun):
        return opened(request)
    after = own.removeprefix(known.begun)
    kept = _kept(known, after, words)
    insert = after[len(words(known.ids[:kept])) :] if kept else after
    return Known(known.chat, len(request.images), own), Step(author=Author.FEEDBACK, insert=insert, keep=kept)


def _kept(known: Known, after: str, words: Callable[[Sequence[int]], str]) -> int:
    """How many of the ids say what the text begins with: no id is kept that says anything else."""
    if after.startswith(known.said):
        return len(known.ids)
    low, high = 0, len(known.ids)
    while low < high:  # The longest text of ids that is no longer than what is left of it.
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(words(known.ids[:middle])) <= len(after) else (low, middle - 1)
    while low and not after.startswith(words(known.ids[:low])):
        low -= 1
    return low


def _without_dummies(messages: Sequence[dict[str, Any]]) -> Messages:
    chat = list(messages)
    while chat and chat[-1].get("role") == "assistant" and not chat[-1].get("content"):
        chat.pop()
    return chat


def left_out(
    turns: Sequence[tuple[int, ...]], returned: Sequence[tuple[int, bool]], ends: frozenset[int]
) -> list[list[tuple[int, int]]]:
    """Of each of the policy's turns, the spans of ids that a scheduler's masks take away.

    What it returns that the policy did not write is passed over; a turn that is not among it is learned from.
    """
    ids, at = [id for id, _ in returned], 0
    found: list[list[tuple[int, int]]] = []
    for turn in turns:
        said = turn[:-1] if turn and turn[-1] in ends else turn
        begin = _at(ids, said, at)
        if begin is None or not said:
            found.append([])
            continue
        at = begin + len(said)
        masks = [mask for _, mask in returned[begin:at]]
        if len(turn) > len(said):  # The end is learned from as what is before it, where nobody speaks of it.
            masks.append(returned[at][1] if at < len(ids) and ids[at] == turn[-1] else masks[-1])
        found.append(_spans(masks))
    return found


def _at(ids: Sequence[int], said: Sequence[int], start: int) -> int | None:
    wide = len(said)
    places = range(start, len(ids) - wide + 1)
    return next((place for place in places if tuple(ids[place : place + wide]) == tuple(said)), None)


def _spans(masks: Sequence[bool]) -> list[tuple[int, int]]:
    spans, at = [], 0
    for learned, run in groupby(masks):
        wide = sum(1 for _ in run)
        if not learned:
            spans.append((at, at + wide))
        at += wide
    return spans
