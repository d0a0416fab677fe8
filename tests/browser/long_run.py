"""Writes a run of long rollouts: with many turns, with two ledgers, and with more tokens than a page can draw."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.browser.sample_run import SETTINGS, CreditSequence, sample_tokenizer
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import EXCLUDED_SPANS, Rollout, StopReason
from trainer.storage.rollout_file import RolloutWriter

TURNS, TOKENS = 60, 130_000
MANY_TURNS, TWO_LEDGERS, MANY_TOKENS, _, BRANCHES = range(5)
"""Their numbers in the run."""
EXCLUDED_TOKENS = 6
"""The number of excluded tokens at the start of each turn in the rollout with two ledgers."""


def write_long_run(folder: Path) -> Path:
    (folder / "model").mkdir(parents=True)
    sample_tokenizer().save(str(folder / "model" / "tokenizer.json"))
    (folder / "run.json").write_text(json.dumps({"model": str(folder / "model"), "settings": SETTINGS}))
    turns = Rollout("turns", Ledger(tuple(_turns(range(TURNS)))), StopReason.DONE, "1-0-0", rewards={"right": 1.0})
    parts = [Ledger(tuple(_turns(range(first, first + 2), EXCLUDED_TOKENS))) for first in (0, 2)]
    two_ledgers = Rollout("anew", parts[1], StopReason.DONE, "1-0-1", earlier=(parts[0],), rewards={"right": 1.0})
    tokens = [
        Rollout("tokens", _long_ledger(index), StopReason.LENGTH_TURN, "1-0-2", index, rewards={"right": float(index)})
        for index in range(2)
    ]
    with RolloutWriter(folder) as writer:
        for rollout in (turns, two_ledgers, *tokens, _branched_rollout()):
            writer.add(rollout)
        writer.add_credits(1, [_credit_sequence(two_ledgers, ledger) for ledger in two_ledgers.ledgers])
    return folder


def _branched_rollout() -> Rollout:
    """As an agent plays it: a fork of the first turn, which the agent changed, and the main line."""
    prompt, first, *_ = _turns(range(1))
    changed = replace(first, info={"changed_by_agent": ["arguments"]})
    copy = Entry(Author.TASK, first.ids, first.messages, source="branch")
    _, second, answer, third, _ = _turns(range(1, 3))
    fork, main = Ledger((prompt, changed, answer, second)), Ledger((prompt, copy, answer, third, answer, second))
    infos = {"agent": {"branches": 2}}
    return Rollout("branches", main, StopReason.DONE, "1-0-3", earlier=(fork,), rewards={"right": 1.0}, infos=infos)


def _turns(numbers: range, excluded: int = 0) -> Iterator[Entry]:
    yield _prompt_entry()
    for number in numbers:
        text = f"Turn {number}. " + "I look at it once more, from another side. " * (1 + 7 * number % 23)
        ids, info = _ids(text), {EXCLUDED_SPANS: [[0, excluded]]} if excluded else {}
        message = {"role": "assistant", "content": text}
        yield Entry(Author.POLICY, ids, (message,), (-0.5,) * len(ids), version=0, finish_reason="stop", info=info)
        answer = {"role": "tool", "name": "look", "content": f"Seen {number} times. " * (1 + 5 * number % 17)}
        yield Entry(Author.TOOL, _ids(answer["content"]), (answer,), source="look")


def _long_ledger(index: int) -> Ledger:
    ids = (_ids("It begins.\n" * 99) + _ids(f"Now {index}, and on and on.\n") * TOKENS)[:TOKENS]
    return Ledger(
        (_prompt_entry(), Entry(Author.POLICY, ids, logprobs=(-0.25,) * TOKENS, version=0, finish_reason="length"))
    )


def _prompt_entry() -> Entry:
    return Entry(Author.TASK, _ids("Look at it."), ({"role": "user", "content": "Look at it."},))


def _credit_sequence(rollout: Rollout, ledger: Ledger) -> CreditSequence:
    weights = tuple(
        float(entry.author is Author.POLICY and place >= EXCLUDED_TOKENS)
        for entry in ledger
        for place in range(len(entry.ids))
    )
    return CreditSequence(rollout.name, weights, weights)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(sample_tokenizer().encode(text).ids)
