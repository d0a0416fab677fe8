"""Builds a rollout's ledger: appends turns, continues an unfinished turn, or starts over with another history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gateway.types import EMPTY, ToolCall, ToolSpec
from trainer.engine.base import Generation
from trainer.ledger import BRANCH, COPIED, OFFERED, Author, Entry, Ledger, Message, encode_version_runs
from trainer.rollout.rollout import EXCLUDED_SPANS
from trainer.rollout.steppers import Step
from trainer.template.media_layout import MediaLayout

if TYPE_CHECKING:
    from trainer.template import Template


class LedgerBuilder:
    """The growing ledger of one rollout."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.ledger = Ledger()
        self.earlier: list[Ledger] = []
        """Ledgers that the current one does not continue."""
        self.unfinished_ids: tuple[int, ...] = ()
        """If a plug-in inserted text into the current turn: the turn's ids before the policy's next ones."""

    def add(self, entry: Entry) -> None:
        """Appends an entry."""
        self.ledger += entry

    def next_ids(
        self, step: Step, messages: Sequence[Message], ended: bool, specs: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """The ids to append before the policy's next turn. `ended`: whether the policy ended its turn itself."""
        if step.history is not None:
            if self.ledger.entries:
                self.earlier.append(self.ledger)
            self.ledger, ids = Ledger(), self.template.encode_prompt(messages, specs)
        elif step.keep_ids is not None or (step.insert and not messages):
            return self._insert(step.insert, ended, step.keep_ids)
        else:
            ids = self.template.encode_tail(messages, ended=ended, calls=self._last_calls())
        self.unfinished_ids = self.template.encode_insert(step.insert) if step.insert else ()
        return ids + self.unfinished_ids

    def _last_calls(self) -> Sequence[Mapping[str, Any]]:
        """The calls in the latest turn's message, which the messages to append answer."""
        messages = self.ledger.entries[-1].messages if self.ledger.entries else ()
        return (messages[-1].get("tool_calls") or ()) if messages else ()

    def _insert(self, text: str, ended: bool, keep_ids: int | None) -> tuple[int, ...]:
        """Reopens the last turn: drops its end token, and its message until the turn is complete again."""
        *before, turn = self.ledger.entries
        count = len(turn.ids) - ended if keep_ids is None else keep_ids
        if count < len(turn.ids):
            turn = _truncate(turn, count)
        self.ledger = Ledger((*before, replace(turn, messages=())))
        ids = self.template.encode_insert(text)
        self.unfinished_ids += turn.ids + ids
        return ids

    def restart_if_rewritten(self, specs: Sequence[ToolSpec], source: str) -> None:
        """Starts a new ledger if the template would render the history differently, as without earlier reasoning."""
        previous = self.ledger
        prompt = self.template.rerender_prompt(previous, specs)
        if prompt is not None:
            media = tuple(span.medium for span in previous.media_spans)
            widths = tuple(span.stop - span.start for span in previous.expanded.media_spans)
            layout = MediaLayout(previous.messages, media, widths)
            if previous.turns:
                self.earlier.append(previous)
            info = {key: value for key, value in previous.entries[0].info.items() if key in (BRANCH, OFFERED)}
            entry = Entry(Author.TASK, prompt, parts=media, source=source, info=info)
            self.ledger = Ledger((self.template.attach_media(layout, entry),))

    def exclude_spans(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Excludes spans from the loss; `spans` has a list for each of the policy's turns, over all ledgers."""
        turn_spans = iter(spans)

        def mark(ledger: Ledger) -> Ledger:
            return Ledger(
                tuple(
                    _exclude(entry, next(turn_spans, ())) if entry.author is Author.POLICY else entry
                    for entry in ledger
                )
            )

        if any(spans):
            self.earlier = [mark(ledger) for ledger in self.earlier]
            self.ledger = mark(self.ledger)


def as_context(entry: Entry) -> Entry:
    """An entry as part of another ledger's prompt: the policy's turns are trained where it wrote them."""
    return replace(
        entry,
        author=Author.TASK,
        logprobs=None,
        version=None,
        earlier_versions=(),
        cached_tokens=0,
        experts=None,
        finish_reason=None,
        calls=(),
        outcomes=(),
        reward=None,
        source=BRANCH if entry.author is Author.POLICY else entry.source,
        info={COPIED: True},
    )


def make_policy_entry(
    generation: Generation, message: Message, calls: tuple[ToolCall, ...], info: Mapping[str, Any] = EMPTY
) -> Entry:
    """The entry of a turn as the engine sampled it."""
    return Entry(
        Author.POLICY,
        generation.ids,
        (message,),
        logprobs=generation.logprobs,
        version=generation.version,
        earlier_versions=generation.earlier_versions,
        cached_tokens=generation.cached_tokens,
        experts=generation.experts,
        finish_reason=generation.finish_reason,
        calls=calls,
        info=info,
    )


def _truncate(turn: Entry, count: int) -> Entry:
    """The turn's first `count` ids, with their logprobs and versions."""
    earlier, last = turn.earlier_versions, turn.version
    if earlier and last is not None:
        versions = [version for version in turn.versions[:count] if version is not None]
        last, earlier = encode_version_runs(versions, last)
    ids, logprobs = turn.ids[:count], (turn.logprobs or ())[:count]
    return replace(
        turn, ids=ids, logprobs=logprobs, version=last, earlier_versions=earlier, experts=None, finish_reason=None
    )


def _exclude(turn: Entry, spans: Sequence[tuple[int, int]]) -> Entry:
    excluded = [list(span) for span in spans]
    return replace(turn, info={**turn.info, EXCLUDED_SPANS: excluded}) if excluded else turn
