"""Which of the policy's tokens are learned from, and how much, is a number for each token of a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite

from gateway.errors import ConfigError
from trainer.ledger import Ledger
from trainer.plug import plug_in
from trainer.run.rollout import LEFT_OUT

FIELD = "algorithm.credit.rounds"
Weigh = Callable[[Ledger], Sequence[float]]
"""A number of 0 or more for each token; 0 for what the policy did not write. A rollout of several ledgers comes as one,
end to end."""


def every(ledger: Ledger) -> tuple[float, ...]:
    """All that the policy wrote."""
    return tuple(map(float, ledger.mask))


def last(ledger: Ledger) -> tuple[float, ...]:
    """The policy's last turn alone."""
    turns = ledger.turns
    return tuple(float(bool(turns) and entry is turns[-1]) for entry in ledger for _ in entry.ids)


NAMES: Mapping[str, Weigh] = {"all": every, "last": last}


def weigh_of(name: str) -> Weigh:
    """`all`, `last`, or one's own by `module:function` or `file.py:function`."""
    if known := NAMES.get(name):
        return known
    remedy = f"write {', '.join(NAMES)}, or module:function with a function that gives each token of a ledger a number"
    if ":" not in name:
        raise ConfigError(f"there are no rounds called {name!r}", field=FIELD, remedy=remedy)
    found: Weigh = plug_in(name, FIELD)
    if not callable(found):
        raise ConfigError(f"{name!r} is no function", field=FIELD, remedy=remedy)
    return found


def reading(weigh: Weigh, words: Callable[[Sequence[int]], str]) -> Weigh:
    """The same, once it knows what ids say, if it cares."""
    asked: Callable[[Callable[[Sequence[int]], str]], Weigh] | None = getattr(weigh, "reading", None)
    return weigh if asked is None else asked(words)


def weights(ledger: Ledger, weigh: Weigh, name: str) -> tuple[float, ...]:
    """What `weigh` says, once it is known to make sense; `name` is the rollout's."""
    called = getattr(weigh, "__name__", type(weigh).__name__)
    try:
        given = tuple(map(float, weigh(ledger)))
    except Exception as error:  # boundary: a function of the user's own may raise anything
        raise ValueError(f"rollout {name}: {called} raised {type(error).__name__}: {error}") from error
    if len(given) != len(ledger):
        raise ValueError(f"rollout {name}: {called} gave {len(given)} weights for {len(ledger)} tokens")
    for token, (weight, written) in enumerate(zip(given, ledger.mask, strict=True)):
        if not isfinite(weight) or weight < 0:
            raise ValueError(f"rollout {name}: {called} gave token {token} a weight of {weight}; 0 or more is needed")
        if weight and not written:
            author = ledger.author_at(token)
            raise ValueError(f"rollout {name}: {called} gave token {token} a weight, and the {author} wrote it")
    return tuple(0.0 if left else weight for left, weight in zip(left_out(ledger), given, strict=True))


def left_out(ledger: Ledger) -> Iterator[bool]:
    """Of each id, whether a plug-in said that nothing is to be learned from it."""
    for entry in ledger:
        spans = entry.info.get(LEFT_OUT, ())
        yield from (any(start <= place < stop for start, stop in spans) for place in range(len(entry.ids)))
