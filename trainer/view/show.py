"""Rollouts in the terminal: all of a run in a table, or one as it was written, coloured by who wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import inf, isfinite

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text as Line

from gateway.types import Outcome, ToolCall
from trainer.ledger import Author, Entry
from trainer.run.credits import Credit
from trainer.run.rollout import Rollout
from trainer.view.credited import UNKNOWN, Credited
from trainer.view.panel import duration
from trainer.view.text import STYLES, Decode, line, parts, printable, said, share
from trainer.view.why import because, weightless

STRIP = 72
"""Columns of the time that a rollout took."""
PHASES = {
    "queueing": "dim",
    "generating": STYLES[Author.POLICY],
    "calling": STYLES[Author.TOOL],
    "interacting": STYLES[Author.FEEDBACK],
}
COLUMNS = ("#", "task", "group", "stop", "turns", "tokens", "written", "cached", "reward", "outcomes")


def show(
    run: Sequence[Rollout],
    console: Console,
    *,
    rollout: int | None = None,
    decode: Decode | None = None,
    credited: Credited = UNKNOWN,
) -> None:
    """The whole run, or one of its rollouts by its number; `decode` is the tokenizer's."""
    if rollout is None:
        _table(run, console)
        return
    for text in _one(run[rollout], rollout, decode, credited):
        console.print(text, soft_wrap=True, highlight=False)


def _table(run: Iterable[Rollout], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        number = column in ("#", "turns", "tokens", "written", "cached", "reward")
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    stops: Counter[str] = Counter()
    rewards: list[float] = []
    for place, rollout in enumerate(run):
        stops[rollout.stop] += 1
        rewards += [] if rollout.reward is None else [rollout.reward]
        style = "dim" if rollout.stop.infrastructure else ""
        table.add_row(*(Line(cell) for cell in _cells(place, rollout)), style=style)
    room = Measurement.get(console, console.options.update(max_width=10_000), table)
    table.width = max(room.minimum, min(room.maximum, console.width))  # Too wide to read is better than left out.
    console.print(table, soft_wrap=True)
    ended = ", ".join(f"{count} {stop}" for stop, count in stops.most_common())
    mean = f"; mean reward {sum(rewards) / len(rewards):.3g} of {len(rewards)} scored" if rewards else ""
    total = stops.total()
    text = f"{total} rollout{'' if total == 1 else 's'}{': ' if ended else ''}{ended}{mean}"
    console.print(Line(text), soft_wrap=True)


def _cells(place: int, rollout: Rollout) -> tuple[str, ...]:
    ledgers, turns = rollout.ledgers, rollout.turns
    outcomes = Counter(outcome for ledger in ledgers for entry in ledger for outcome in entry.outcomes)
    return (
        str(place),
        line(rollout.task),
        line(f"{rollout.group}/{rollout.index}"),
        rollout.stop,
        str(len(turns)),
        str(sum(map(len, ledgers))),
        str(sum(len(turn.ids) for turn in turns)),
        share(sum(ledger.cached for ledger in ledgers), sum(ledger.asked for ledger in ledgers)),
        _number(rollout.reward),
        ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()),
    )


def _one(rollout: Rollout, number: int, decode: Decode | None, credited: Credited) -> Iterator[Line]:
    yield from _head(rollout, number)
    if rollout.timeline:
        yield _strip(rollout)
    yield Line.assemble("written by ", *_legend())
    if decode is None:
        yield Line("no tokenizer at hand: these are the messages that were rendered, not the text of the ids")
    for place, ledger in enumerate(rollout.ledgers):
        if rollout.earlier:
            began = ", where the policy began anew" if place else ""
            yield from (Line(""), Line(f"══ ledger {place}{began}: {len(ledger)} tokens", style="bold"))
        yield from _ledger(rollout, place, decode, credited)


def _ledger(rollout: Rollout, number: int, decode: Decode | None, credited: Credited) -> Iterator[Line]:
    ledger, credits = rollout.ledgers[number], credited.tokens(number)
    turn = sum(len(before.turns) for before in rollout.ledgers[:number]) - 1
    for place, (start, seen, entry) in enumerate(zip(ledger.starts, ledger.expanded.starts, ledger, strict=True)):
        turn += entry.author is Author.POLICY
        yield Line("")
        yield _boundary(entry, start, seen, turn)
        if text := said(entry, decode):
            yield Line(text, style=STYLES[entry.author])
        yield from _calls(entry, ledger.entries[place + 1 :])
        if entry.author is Author.POLICY and (credits or credited.nothing):
            yield from _worth(rollout, entry, credits[seen : seen + len(entry.ids)], credited.nothing)
        yield from _media(entry, start)


def _head(rollout: Rollout, number: int) -> Iterator[Line]:
    ledgers, turns = rollout.ledgers, rollout.turns
    asked, cached = sum(ledger.asked for ledger in ledgers), sum(ledger.cached for ledger in ledgers)
    written = sum(len(turn.ids) for turn in turns)
    kind = f" of kind {line(rollout.kind)}" if rollout.kind else ""
    yield Line(f"rollout {number}: task {line(rollout.task)}{kind}, group {line(rollout.group)}, index {rollout.index}")
    yield Line(
        f"stop {rollout.stop}; {len(turns)} turns; {sum(map(len, ledgers))} tokens, {written} by the policy;"
        f" cached {cached} of {asked} asked ({share(cached, asked)})"
    )
    if rollout.stop.infrastructure:
        yield Line(f"not scored: {rollout.stop} says nothing of the policy")
    elif rollout.rewards:
        yield Line(f"reward {_number(rollout.reward)}: {line(parts(rollout))}")
    if rollout.reason:
        yield Line(f"reason: {printable(rollout.reason)}")
    if drift := rollout.infos.get("drift"):
        causes = ", ".join(f"{count} {line(cause)}" for cause, count in drift.items())
        yield Line(f"differs from the template's own rendering: {causes}")
    if rollout.timing:
        yield Line("time: " + ", ".join(f"{line(phase)} {spent:.3g} s" for phase, spent in rollout.timing.items()))


def _strip(rollout: Rollout) -> Line:
    """Where the time went, phase after phase, each in the colour of whose time it was."""
    spent = [span.spent_s if isfinite(span.spent_s) and span.spent_s > 0 else 0.0 for span in rollout.timeline]
    strip, whole = Line("      "), sum(spent)
    for span, seconds in zip(rollout.timeline, spent, strict=True):
        wide = round(seconds / whole * STRIP) if 0 < whole < inf else 0
        strip.append(("░" if span.phase == "queueing" else "█") * wide, PHASES.get(span.phase, ""))
    return strip


def _worth(rollout: Rollout, entry: Entry, mine: Sequence[Credit], nothing: str) -> Iterator[Line]:
    """By what weighs most of its tokens; those that weigh nothing beside it are told too."""
    credit = max(mine, key=lambda one: (one[2], abs(one[1])), default=None)
    trained, why = because(rollout, entry, credit=credit, nothing=nothing)
    advantage = f", advantage {credit[1]:+.3g}" if credit and credit[2] else ""
    head = ("  trained" if trained else "  not trained") + advantage
    yield Line.assemble((head, "green" if trained else ""), (f": {line(why)}", "dim"))
    if trained and (idle := [place for place, one in enumerate(mine) if not one[2]]):
        few = f"  not trained, {len(idle)} of these tokens"
        yield Line.assemble(few, (f": {line(weightless(entry, idle))}", "dim"))


def _legend() -> list[str | tuple[str, str]]:
    """Who wrote what, each in their colour."""
    told: list[str | tuple[str, str]] = []
    for author, style in STYLES.items():
        told += [", " if told else "", (author, style)]
    return told


def _boundary(entry: Entry, start: int, asked: int, turn: int) -> Line:
    notes = [f"tokens {start}-{start + len(entry.ids) - 1}" if entry.ids else "no tokens"]
    if entry.author is Author.POLICY:
        spells = [*(version for version, _ in entry.before), entry.version]
        notes += [
            f"version {', then '.join(map(str, spells))}",
            f"cached {entry.cached} of {asked}",
            f"stop {entry.stop}",
        ]
    if entry.outcomes:
        notes.append(", ".join(entry.outcomes))
    if entry.reward is not None:
        notes.append(f"reward {_number(entry.reward)}")
    if not entry.ids and entry.author is not Author.POLICY:
        notes.append("never read by the policy")
    name = f"turn {turn}: policy" if entry.author is Author.POLICY else str(entry.author)
    source = f" {line(entry.source)}" if entry.source else ""
    return Line.assemble("── ", (name + source, STYLES[entry.author]), "  ", "; ".join(notes))


def _calls(turn: Entry, later: Sequence[Entry]) -> Iterator[Line]:
    """Each call with how it ended; what only looked like a call was answered behind those that were."""
    outcomes: list[Outcome] = []
    for entry in later:
        if entry.author is Author.POLICY:
            break
        outcomes += entry.outcomes if entry.author is Author.TOOL else ()
    if turn.author is Author.POLICY:
        for call, outcome, took in zip_longest(turn.calls, outcomes, _took(later)):
            spent = f" in {duration(took)}" if took else ""
            yield Line(f"  → {_call(call)}  {outcome or 'unanswered'}{spent}")


def _took(later: Sequence[Entry]) -> Iterator[float | None]:
    """How long each call took, where it is known."""
    for entry in later[:1]:
        for told in entry.info.get("tools", ()):
            yield told.get("elapsed_s")


def _call(call: ToolCall | None) -> str:
    return line(f"{call.name}({call.arguments}) as {call.id}") if call else "a malformed call"


def _media(entry: Entry, start: int) -> Iterator[Line]:
    """Each picture, sound and film with the tokens that stand for it."""
    for medium, span, width in zip_longest(entry.media, entry.spans, entry.widths):
        kind = type(medium).__name__.lower()
        where = "with no place in the tokens"
        if span and span[0] < span[1]:
            where = f"at tokens {start + span[0]}-{start + span[1] - 1}" + (f", seen as {width}" if width else "")
        yield Line(f"  ▣ {kind} ({line(medium.mime)}, {len(medium.data):,} bytes) {where}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
