"""Prints rollouts in the terminal: all of a run as a table, or one token by token, coloured by author."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import inf, isfinite

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text as Line

from gateway.plural import format_count
from gateway.types import Outcome, ToolCall
from trainer.ledger import Author, Entry
from trainer.rollout.rollout import CHANGED_BY_AGENT, Rollout
from trainer.storage.rollout_file import Rollouts
from trainer.storage.rollout_summary import RolloutSummary
from trainer.storage.token_credit import CreditSpan
from trainer.view.branches import name_branches
from trainer.view.text import (
    STYLES,
    Decode,
    entry_text,
    format_duration,
    format_number,
    format_rewards,
    format_share,
    to_line,
    to_printable,
)
from trainer.view.why import UNKNOWN_CREDIT, RolloutCredit, explain_training, explain_zero_weight

COLUMNS = ("#", "task", "group", "stop", "turns", "tokens", "written", "cached", "reward", "outcomes")
NUMBERS = frozenset({"#", "turns", "tokens", "written", "cached", "reward"})
GAP = "  "
MAX_WIDTH = 24
"""The width of a longer text, in a table that is wider than the terminal: it continues on the next line."""
BOLD, DIM, PLAIN = Style(bold=True), Style(dim=True), Style.null()


def print_table(run: Rollouts, console: Console) -> None:
    """Prints a row for each rollout, and a summary."""
    stops: Counter[str] = Counter()
    rewards: list[float] = []
    rows: list[tuple[Sequence[str], Style]] = [(COLUMNS, BOLD)]
    for number, summary in run.summaries():
        stops[summary.stop] += 1
        rewards += [] if summary.reward is None else [summary.reward]
        rows.append((_format_cells(number, summary), DIM if summary.is_infrastructure else PLAIN))
    widths = _choose_widths([cells for cells, _ in rows], console.width)
    lines = ((line, style) for cells, style in rows for line in _lay_out(cells, widths))
    console.print(Segments([Segment(f"{line.rstrip()}\n", style) for line, style in lines]), soft_wrap=True, end="")
    stop_counts = ", ".join(f"{count} {to_line(stop)}" for stop, count in stops.most_common())
    mean = f"; mean reward {sum(rewards) / len(rewards):.3g} of {len(rewards)} scored" if rewards else ""
    total = stops.total()
    text = f"{format_count(total, 'rollout')}{': ' if stop_counts else ''}{stop_counts}{mean}"
    console.print(Line(text), soft_wrap=True)


def _format_cells(number: int, summary: RolloutSummary) -> tuple[str, ...]:
    return (
        str(number),
        to_line(summary.task),
        to_line(f"{summary.group}/{summary.index}"),
        to_line(summary.stop),
        str(summary.turns),
        str(summary.tokens),
        str(summary.written),
        format_share(summary.cached, summary.asked),
        format_number(summary.reward),
        to_line(", ".join(f"{count} {outcome}" for outcome, count in summary.outcomes.most_common())),
    )


def _choose_widths(rows: Iterable[Sequence[str]], available: int) -> list[int]:
    """The width of each column. A table that is too wide has narrower texts: that is better than missing columns."""
    widths = [max(map(cell_len, set(column))) for column in zip(*rows, strict=True)]
    if sum(widths) + len(GAP) * (len(widths) - 1) <= available:
        return widths
    limits = (width if name in NUMBERS else MAX_WIDTH for name, width in zip(COLUMNS, widths, strict=True))
    return [min(width, limit) for width, limit in zip(widths, limits, strict=True)]


def _lay_out(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of a row."""
    folded = [
        [cell] if cell_len(cell) <= width else chop_cells(cell, width)
        for cell, width in zip(cells, widths, strict=True)
    ]
    for pieces in zip_longest(*folded, fillvalue=""):
        yield GAP.join(
            " " * (width - cell_len(piece)) + piece if name in NUMBERS else piece + " " * (width - cell_len(piece))
            for name, piece, width in zip(COLUMNS, pieces, widths, strict=True)
        )


TIMELINE_WIDTH = 72
"""The width of a rollout's timeline."""
PHASE_STYLES = {
    "queueing": "dim",
    "generating": STYLES[Author.POLICY],
    "calling": STYLES[Author.TOOL],
    "interacting": STYLES[Author.FEEDBACK],
}


def print_rollout(
    rollout: Rollout, number: int, console: Console, decode: Decode | None, credited: RolloutCredit = UNKNOWN_CREDIT
) -> None:
    """Prints the rollout with this number, token by token; `decode` is the tokenizer's."""
    for text in _rollout_lines(rollout, number, decode, credited):
        console.print(text, soft_wrap=True, highlight=False)


def _rollout_lines(rollout: Rollout, number: int, decode: Decode | None, credited: RolloutCredit) -> Iterator[Line]:
    yield from _head_lines(rollout, number)
    if rollout.timeline:
        yield _timeline_bar(rollout)
    yield Line.assemble("written by ", *_author_legend())
    if decode is None:
        yield Line("without a tokenizer, this shows the messages that were rendered instead of the text of the ids")
    names = name_branches(rollout)
    for index, ledger in enumerate(rollout.ledgers):
        if rollout.earlier:
            began = ", where the policy saw a new history" if index else ""
            began = f", {to_line(names[index])}" if names else began
            yield from (Line(""), Line(f"══ ledger {index}{began}: {len(ledger)} tokens", style="bold"))
        yield from _ledger_lines(rollout, index, decode, credited)


def _ledger_lines(rollout: Rollout, number: int, decode: Decode | None, credited: RolloutCredit) -> Iterator[Line]:
    ledger, credits = rollout.ledgers[number], credited.expand(number)
    turn = sum(len(before.turns) for before in rollout.ledgers[:number]) - 1
    for index, (start, expanded_start, entry) in enumerate(
        zip(ledger.starts, ledger.expanded.starts, ledger, strict=True)
    ):
        turn += entry.author is Author.POLICY
        yield Line("")
        yield _entry_heading(entry, start, expanded_start, turn)
        if text := entry_text(entry, decode):
            yield Line(text, style=STYLES[entry.author])
        yield from _call_lines(entry, ledger.entries[index + 1 :])
        if entry.author is Author.POLICY and (credits or credited.untrained_reason):
            spans = credits[expanded_start : expanded_start + len(entry.ids)]
            yield from _credit_lines(rollout, entry, spans, credited.untrained_reason)
        yield from _media_lines(entry, start)


def _head_lines(rollout: Rollout, number: int) -> Iterator[Line]:
    ledgers, turns = rollout.ledgers, rollout.turns
    asked, cached = sum(ledger.prompt_tokens for ledger in ledgers), sum(ledger.cached_tokens for ledger in ledgers)
    generated = sum(len(turn.ids) for turn in turns)
    kind = f" of kind {to_line(rollout.kind)}" if rollout.kind else ""
    group = f", group {to_line(rollout.group)}, index {rollout.index}" if rollout.group else ""
    yield Line(f"rollout {number}: task {to_line(rollout.task)}{kind}{group}")
    yield Line(
        f"stop {rollout.stop}; {len(turns)} turns; {sum(map(len, ledgers))} tokens, {generated} by the policy;"
        f" {cached} of {asked} input tokens cached ({format_share(cached, asked)})"
    )
    if rollout.stop.is_infrastructure:
        yield Line(f"not scored: {rollout.stop} is not the policy's fault")
    elif rollout.rewards:
        yield Line(f"reward {format_number(rollout.reward)}: {to_line(format_rewards(rollout))}")
    if rollout.reason:
        yield Line(f"reason: {to_printable(rollout.reason)}")
    if drift := rollout.infos.get("drift"):
        causes = ", ".join(f"{count} {to_line(cause)}" for cause, count in drift.items())
        yield Line(f"differs from what the chat template renders: {causes}")
    if rollout.timing:
        yield Line("time: " + ", ".join(f"{to_line(phase)} {spent:.3g} s" for phase, spent in rollout.timing.items()))


def _timeline_bar(rollout: Rollout) -> Line:
    """The rollout's phases as a coloured bar, with widths by duration."""
    spent = [span.duration_s if isfinite(span.duration_s) and span.duration_s > 0 else 0.0 for span in rollout.timeline]
    strip, total = Line("      "), sum(spent)
    for span, seconds in zip(rollout.timeline, spent, strict=True):
        width = round(seconds / total * TIMELINE_WIDTH) if 0 < total < inf else 0
        strip.append(("░" if span.phase == "queueing" else "█") * width, PHASE_STYLES.get(span.phase, ""))
    return strip


def _credit_lines(
    rollout: Rollout, entry: Entry, credits: Sequence[CreditSpan], untrained_reason: str
) -> Iterator[Line]:
    """Why the turn is trained, by its token with the largest weight, and why some of its tokens are not."""
    credit = max(credits, key=lambda span: (span[2], abs(span[1])), default=None)
    trained, why = explain_training(rollout, entry, credit=credit, untrained_reason=untrained_reason)
    advantage = f", advantage {credit[1]:+.3g}" if credit and credit[2] else ""
    head = ("  trained" if trained else "  not trained") + advantage
    yield Line.assemble((head, "green" if trained else ""), (f": {to_line(why)}", "dim"))
    if trained and (untrained := [index for index, span in enumerate(credits) if not span[2]]):
        label = f"  not trained, {len(untrained)} of these tokens"
        yield Line.assemble(label, (f": {to_line(explain_zero_weight(entry, untrained))}", "dim"))


def _author_legend() -> list[str | tuple[str, str]]:
    """The authors, each in its colour."""
    texts: list[str | tuple[str, str]] = []
    for author, style in STYLES.items():
        texts += [", " if texts else "", (author, style)]
    return texts


def _entry_heading(entry: Entry, start: int, asked: int, turn: int) -> Line:
    notes = [f"tokens {start}-{start + len(entry.ids) - 1}" if entry.ids else "no tokens"]
    if entry.author is Author.POLICY:
        versions = [*(version for version, _ in entry.earlier_versions), entry.version]
        notes += [
            f"version {', then '.join(map(str, versions))}",
            f"cached {entry.cached_tokens} of {asked}",
            f"stop {entry.finish_reason}",
        ]
    if changed := entry.info.get(CHANGED_BY_AGENT):
        notes.append(f"changed by the agent: {to_line(', '.join(map(str, changed)))}")
    if entry.outcomes:
        notes.append(", ".join(entry.outcomes))
    if entry.reward is not None:
        notes.append(f"reward {format_number(entry.reward)}")
    if not entry.ids and entry.author is not Author.POLICY:
        notes.append("the policy never read it")
    name = f"turn {turn}: policy" if entry.author is Author.POLICY else str(entry.author)
    source = f" {to_line(entry.source)}" if entry.source else ""
    return Line.assemble("── ", (name + source, STYLES[entry.author]), "  ", "; ".join(notes))


def _call_lines(turn: Entry, later: Sequence[Entry]) -> Iterator[Line]:
    """Each call with its outcome; malformed calls were answered after the valid ones."""
    outcomes: list[Outcome] = []
    for entry in later:
        if entry.author is Author.POLICY:
            break
        outcomes += entry.outcomes if entry.author is Author.TOOL else ()
    if turn.author is Author.POLICY:
        for call, outcome, took in zip_longest(turn.calls, outcomes, _call_durations(later)):
            spent = f" in {format_duration(took)}" if took else ""
            yield Line(f"  → {_format_call(call)}  {outcome or 'unanswered'}{spent}")


def _call_durations(later: Sequence[Entry]) -> Iterator[float | None]:
    """The duration of each call, if it is known."""
    for entry in later[:1]:
        for call in entry.info.get("tools", ()):
            yield call.get("elapsed_s")


def _format_call(call: ToolCall | None) -> str:
    return to_line(f"{call.name}({call.arguments}) as {call.id}") if call else "a malformed call"


def _media_lines(entry: Entry, start: int) -> Iterator[Line]:
    """Each image, audio and video with the tokens that stand for it."""
    for medium, span, width in zip_longest(entry.media, entry.spans, entry.widths):
        kind = type(medium).__name__.lower()
        where = "without tokens"
        if span and span[0] < span[1]:
            where = f"at tokens {start + span[0]}-{start + span[1] - 1}" + (f", expanded to {width}" if width else "")
        yield Line(f"  ▣ {kind} ({to_line(medium.mime)}, {len(medium.data):,} bytes) {where}")
