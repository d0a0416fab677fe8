"""Shortens the chat of a rollout that nears the end of its context, around any stepper.

Nothing that the policy wrote is encoded again: turns that are kept stand in the next ledger with their own ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from anyio import to_thread

from gateway.await_user_code import await_user_code
from gateway.errors import safe_repr
from mtrl_plugins.history.settings import HistorySettings
from trainer.ledger import BRANCH, Author, Entry, Ledger, Message
from trainer.load_plugin import load_plugin
from trainer.rollout.rollout import IGNORED_CALLS, StopReason
from trainer.rollout.steppers import (
    RolloutEnd,
    RolloutStart,
    RolloutStepper,
    Step,
    Stepper,
    Turn,
    call_method,
    check_finished,
    open_stepper,
    take_step,
)
from trainer.template.media_layout import MediaLayout, has_media

POSTPONED = "The answer is too long for what is left of this chat. It follows your summary."
SUMMARY = "Your summary of what was done so far:\n"
EMPTY_SUMMARY = "Earlier turns were removed, and your summary of them is empty."


class Compaction:
    """Wraps a stepper."""

    def __init__(self, settings: HistorySettings, inner: Stepper) -> None:
        self.settings, self.inner = settings, inner
        self.function: Any = load_plugin(settings.kind, "history.kind") if ":" in settings.kind else None

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, CompactingStepper]]:
        """Opens the wrapped stepper."""
        async with open_stepper(self.inner, start) as (first, inner):
            yield first, CompactingStepper(self, inner, start, first.history or ())

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


def split_turns(ledger: Ledger) -> list[tuple[Entry, ...]]:
    """The entries after the opening, by turn: each with what was inserted into it, and its answer."""
    entries = ledger.entries
    starts = [
        index
        for index in range(1, len(entries))
        if (entries[index].author is Author.POLICY or entries[index].source == BRANCH) and entries[index - 1].messages
    ]
    return [entries[start:stop] for start, stop in pairwise([*starts, len(entries)])]


def add_text(chat: Sequence[Message], text: str) -> tuple[Message, ...]:
    """The chat with a text at the end of its last question, since templates may refuse two in a row, or as one."""
    if not chat or chat[-1]["role"] != "user":
        return (*chat, {"role": "user", "content": text})
    *before, last = chat
    content = last["content"]
    part = {"type": "text", "text": f"\n\n{text}"}
    return (*before, {**last, "content": [*content, part] if isinstance(content, list) else f"{content}\n\n{text}"})


def _copy(chat: Sequence[Message]) -> list[Message]:
    return deepcopy([dict(message) for message in chat])


def read_chat(value: Any, source: str) -> tuple[Message, ...]:
    """A copy of the chat that a function of the user returned. Raises TypeError if it is none."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) and "role" in one for one in value):
        raise TypeError(f"{source} returned {safe_repr(value)}, not a list of messages")
    return tuple(_copy(value))


class CompactingStepper:
    """The stepper of one rollout."""

    def __init__(
        self, shared: Compaction, inner: Stepper | RolloutStepper, start: RolloutStart, opening: Sequence[Message]
    ) -> None:
        self.settings, self.function, self.inner = shared.settings, shared.function, inner
        self.template, self.limits = start.template, start.limits
        self.opening, self.chat = tuple(opening), tuple(opening)
        """How every chat begins, and the chat so far, with its images."""
        self.after_summary: Step | None = None
        """What follows the summary that the policy was asked for."""
        self.counts: Counter[str] = Counter()
        self.summary_turns: list[int] = []

    async def check_finished(self, turn: Turn) -> bool | StopReason:
        """Asks the wrapped stepper, unless the turn is a summary."""
        return False if self.after_summary is not None else await check_finished(self.inner, turn)

    async def step(self, turn: Turn) -> Step:
        """The wrapped stepper's answer; if it makes the chat too long, in a new chat, or after a summary."""
        if self.after_summary is not None:
            return self._go_on(turn, self.after_summary)
        step = await take_step(self.inner, turn)
        if step.history is not None:
            self.opening = self.chat = step.history
        before = self.chat
        if step.messages and step.history is None:
            self.chat = (*self.chat, turn.messages[-1], *step.messages)
        goes_on = step.stop is None and step.history is None and not step.insert and step.keep_ids is None
        if not (goes_on and step.messages) or self.counts["compactions"] >= self.settings.times:
            return step
        used = await self._count_tokens(turn, step.messages)
        full = self.settings.at * turn.max_tokens
        is_summary = self.settings.kind == "summarise"
        if is_summary:  # The next turn must fit, and a summary after it; the settings do not know the engine's context.
            request = await self._count_tokens(turn, self._postpone(step)) - len(turn.ledger.expanded)
            full = min(full, turn.max_tokens - 2 * self.limits.turn_tokens - request)
        if used < full:
            return step
        if is_summary:
            return await self._ask_for_summary(turn, step)
        return await self._shorten(turn, step, used, before)

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """What the wrapped stepper adds, which does not know of summaries, and the counts."""
        end = RolloutEnd()
        if isinstance(self.inner, RolloutStepper):
            is_summary = self.after_summary is not None
            end = await await_user_code(self.inner.finish(None if is_summary else turn, stop))
        spans = list(end.excluded_spans)
        for number in self.summary_turns if spans else ():
            spans.insert(number - 1, ())
        return RolloutEnd({**end.infos, self.settings.key: dict(self.counts)}, spans)

    async def _count_tokens(self, turn: Turn, messages: Sequence[Message]) -> int:
        """The tokens of the ledger with an answer to the turn. Raises TemplateError."""
        layout = MediaLayout(tuple(messages))
        if has_media(messages):
            layout = await to_thread.run_sync(self.template.prepare_media, messages)
        ended = self.template.is_turn_ended(turn.ledger.entries[-1].ids)
        ids = self.template.encode_tail(layout.messages, ended=ended, calls=turn.messages[-1].get("tool_calls") or ())
        return len(turn.ledger.expanded) + len(ids) + sum(width - 1 for width in layout.widths if width)

    async def _ask_for_summary(self, turn: Turn, step: Step) -> Step:
        """The answer with the request. An answer that leaves no room for the summary follows it."""
        asked, after, parts = add_text(step.messages, self.settings.request), Step(), step.parts
        used = await self._count_tokens(turn, asked)
        if turn.max_tokens - used < self.limits.turn_tokens:
            asked, parts = self._postpone(step), ()
            used = await self._count_tokens(turn, asked)
            after = replace(step, kept=split_turns(turn.ledger)[-1], outcomes=(), reward=None, info={})
        if used >= turn.max_tokens:
            return step
        self.counts["compactions"] += 1
        self.after_summary = after
        return replace(step, messages=asked, parts=parts, ignore_calls=True)

    def _postpone(self, step: Step) -> tuple[Message, ...]:
        """The request, with a note in place of the answer."""
        return add_text([{**message, "content": POSTPONED} for message in step.messages], self.settings.request)

    def _go_on(self, turn: Turn, after: Step) -> Step:
        """A new chat from the summary."""
        self.after_summary = None
        summary = turn.reply.content.strip()
        self.summary_turns.append(turn.number)
        self.counts["summaries"] += 1
        self.counts["summary_tokens"] += len(turn.ledger.entries[-1].ids)
        self.counts["empty_summaries"] += not summary
        self.counts["ignored_calls"] += turn.ledger.entries[-1].info.get(IGNORED_CALLS, 0)
        history = add_text(self.opening, SUMMARY + summary if summary else EMPTY_SUMMARY)
        self.chat = (*history, *(message for entry in after.kept for message in entry.messages), *after.messages)
        return replace(after, history=history, branch=f"after summary {self.counts['summaries']}")

    async def _shorten(self, turn: Turn, step: Step, used: int, before: tuple[Message, ...]) -> Step:
        """The answer in a new chat, as the window or the function of the user says."""
        turns, history = split_turns(turn.ledger), self.opening
        kept = turns[-1]
        if self.function is not None:
            history = read_chat(await call_method(self.function, _copy(before)), self.settings.kind)
        else:
            sizes = [sum(len(entry.expanded.ids) for entry in entries) for entries in turns]
            room = self.settings.at * turn.max_tokens / 2 - (used - sum(sizes))
            newest = max(1, sum(size <= room for size in accumulate(reversed(sizes))))
            if newest == len(turns):
                return step
            kept = tuple(entry for entries in turns[-newest:] for entry in entries)
        self.counts["compactions"] += 1
        self.chat = (*history, *(message for entry in kept for message in entry.messages), *step.messages)
        return replace(step, history=history, kept=kept, branch=f"after compaction {self.counts['compactions']}")
