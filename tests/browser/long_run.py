"""Rollouts that are long in one way each: many turns, several ledgers, more tokens than a page can hold as nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.browser.made_run import SETTINGS, Weighed, tokenizer
from trainer.ledger import Author, Entry, Ledger
from trainer.run.file import Writer
from trainer.run.rollout import LEFT_OUT, Rollout, StopReason

TURNS, TOKENS = 60, 130_000
MANY_TURNS, ANEW, MANY_TOKENS = range(3)
"""Their places in the run."""
LEFT_OUT_OF = 6
"""Of each of its turns, so many of the first tokens are left out of the loss in the rollout that began anew."""


def long_run(folder: Path) -> Path:
    (folder / "model").mkdir(parents=True)
    tokenizer().save(str(folder / "model" / "tokenizer.json"))
    (folder / "run.json").write_text(json.dumps({"model": str(folder / "model"), "settings": SETTINGS}))
    turns = Rollout("turns", Ledger(tuple(_turns(range(TURNS)))), StopReason.DONE, "1-0-0", rewards={"right": 1.0})
    parts = [Ledger(tuple(_turns(range(first, first + 2), LEFT_OUT_OF))) for first in (0, 2)]
    anew = Rollout("anew", parts[1], StopReason.DONE, "1-0-1", earlier=(parts[0],), rewards={"right": 1.0})
    tokens = [
        Rollout("tokens", _endless(index), StopReason.LENGTH_TURN, "1-0-2", index, rewards={"right": float(index)})
        for index in range(2)
    ]
    with Writer(folder) as writer:
        for rollout in (turns, anew, *tokens):
            writer.add(rollout)
        writer.credit(1, [_weighed(anew, ledger) for ledger in anew.ledgers])
    return folder


def _turns(numbers: range, left_out: int = 0) -> Iterator[Entry]:
    yield _asked()
    for number in numbers:
        text = f"Turn {number}. " + "I look at it once more, from another side. " * (1 + 7 * number % 23)
        ids, info = _ids(text), {LEFT_OUT: [[0, left_out]]} if left_out else {}
        message = {"role": "assistant", "content": text}
        yield Entry(Author.POLICY, ids, (message,), (-0.5,) * len(ids), version=0, stop="stop", info=info)
        answer = {"role": "tool", "name": "look", "content": f"Seen {number} times. " * (1 + 5 * number % 17)}
        yield Entry(Author.TOOL, _ids(answer["content"]), (answer,), source="look")


def _endless(index: int) -> Ledger:
    ids = (_ids("It begins.\n" * 99) + _ids(f"Now {index}, and on and on.\n") * TOKENS)[:TOKENS]
    return Ledger((_asked(), Entry(Author.POLICY, ids, logprobs=(-0.25,) * TOKENS, version=0, stop="length")))


def _asked() -> Entry:
    return Entry(Author.TASK, _ids("Look at it."), ({"role": "user", "content": "Look at it."},))


def _weighed(rollout: Rollout, ledger: Ledger) -> Weighed:
    weights = tuple(
        float(entry.author is Author.POLICY and place >= LEFT_OUT_OF)
        for entry in ledger
        for place in range(len(entry.ids))
    )
    return Weighed(rollout.name, weights, weights)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text).ids)
