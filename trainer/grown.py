"""A rollout's ledger as it grows: by a round, by going on in a turn, or anew, where the policy sees another history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.types import ToolSpec
from trainer.ledger import Author, Entry, Ledger, Message, spelled
from trainer.run.rollout import LEFT_OUT
from trainer.steps import Step
from trainer.template.laid import Laid

if TYPE_CHECKING:
    from trainer.template import Template


class Grown:
    def __init__(self, template: Template) -> None:
        self.template = template
        self.ledger = Ledger()
        self.earlier: list[Ledger] = []
        """Ledgers that this one does not begin with."""
        self.unfinished: tuple[int, ...] = ()
        """Of a turn that a plug-in went into, or began, what stands before the policy's next words."""

    def add(self, entry: Entry) -> None:
        self.ledger += entry

    def next_ids(
        self, step: Step, messages: Sequence[Message], ended: bool, specs: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """What the policy reads next; `ended` says whether it ended its turn itself."""
        if step.history is not None:
            if self.ledger.entries:
                self.earlier.append(self.ledger)
            self.ledger, ids = Ledger(), self.template.open(messages, specs)
        elif step.keep is not None or (step.insert and not messages):
            return self._inserted(step.insert, ended, step.keep)
        else:
            ids = self.template.tail(messages, ended=ended)
        self.unfinished = self.template.insert(step.insert) if step.insert else ()
        return ids + self.unfinished

    def _inserted(self, text: str, ended: bool, keep: int | None) -> tuple[int, ...]:
        """The turn goes on: its end, if it had one, is taken back, and its message is told once it is whole."""
        *before, turn = self.ledger.entries
        kept = len(turn.ids) - ended if keep is None else keep
        if kept < len(turn.ids):
            turn = _cut(turn, kept)
        self.ledger = Ledger((*before, replace(turn, messages=())))
        ids = self.template.insert(text)
        self.unfinished += turn.ids + ids
        return ids

    def begin_anew(self, specs: Sequence[ToolSpec], source: str) -> None:
        """Where the template takes back what the policy wrote, the next turn sees a history that it did not write."""
        before = self.ledger
        shown = self.template.anew(before, specs)
        if shown is not None:
            media = tuple(place.medium for place in before.places)
            widths = tuple(place.stop - place.start for place in before.expanded.places)
            laid = Laid(before.messages, media, widths)
            self.earlier.append(before)
            entry = Entry(Author.TASK, shown, parts=media, source=source)
            self.ledger = Ledger((self.template.placed(laid, entry),))

    def leave_out(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Of each of the policy's turns, over all ledgers, the ids that nothing is learned from."""
        told = iter(spans)

        def noted(ledger: Ledger) -> Ledger:
            return Ledger(
                tuple(_without(one, next(told, ())) if one.author is Author.POLICY else one for one in ledger)
            )

        if any(spans):
            self.earlier = [noted(ledger) for ledger in self.earlier]
            self.ledger = noted(self.ledger)


def _cut(turn: Entry, kept: int) -> Entry:
    """What was sampled of it first, with the versions that did."""
    before, last = turn.before, turn.version
    if before and last is not None:
        last, before = spelled([version for version in turn.versions[:kept] if version is not None], last)
    ids, logprobs = turn.ids[:kept], (turn.logprobs or ())[:kept]
    return replace(turn, ids=ids, logprobs=logprobs, version=last, before=before, stop=None)


def _without(turn: Entry, spans: Sequence[tuple[int, int]]) -> Entry:
    left_out = [list(span) for span in spans]
    return replace(turn, info={**turn.info, LEFT_OUT: left_out}) if left_out else turn
