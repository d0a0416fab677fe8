"""Which of the policy's tokens are learned from, and how much, is a number for each token of a ledger."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from gateway.errors import ConfigError
from trainer.ledger import Ledger
from trainer.plug import plug_in
from trainer.run.rollout import LEFT_OUT

FIELD = "algorithm.credit.rounds"
Weigh = Callable[[Ledger], Sequence[float]]
"""A number of 0 or more for each token; 0 for what the policy did not write. A rollout of several ledgers comes as one,
end to end."""
SHOWN = 500
"""Characters of what a user's function raised."""
REMEDY = "mend that function, and go on with --resume from the last step that is saved"


class RoundsError(ValueError):
    """A function of the user's own gave no weights. No number of the step came of it, and no weight moved."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{FIELD}: {problem}\n  remedy: {REMEDY}")


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
    given = _given(ledger, weigh, f"rollout {name}: {called}")
    if len(given) != len(ledger):
        raise RoundsError(f"rollout {name}: {called} gave {len(given)} weights for {len(ledger)} tokens")
    for token, (weight, written) in enumerate(zip(given, ledger.mask, strict=True)):
        if not isfinite(weight) or weight < 0:
            raise RoundsError(f"rollout {name}: {called} gave token {token} a weight of {weight}; 0 or more is needed")
        if weight and not written:
            author = ledger.author_at(token)
            raise RoundsError(f"rollout {name}: {called} gave token {token} a weight, and the {author} wrote it")
    return tuple(0.0 if left else weight for left, weight in zip(left_out(ledger), given, strict=True))


def _given(ledger: Ledger, weigh: Weigh, who: str) -> tuple[float, ...]:
    """As many numbers as there are. It may be a generator, so that to read it is to run what is the user's."""
    try:
        given: Any = weigh(ledger)
        several = tuple(given) if isinstance(given, Iterable) else None
    except (Exception, SystemExit) as error:  # boundary: a user's function may raise anything, and a script may end
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error}"[:SHOWN]
        raise RoundsError(f"{who} raised {said} ({frame.filename}:{frame.lineno})") from error
    if several is None:
        raise RoundsError(f"{who} gave {_shown(given)}, and no list of {len(ledger)} numbers")
    return tuple(_number(weight, token, who) for token, weight in enumerate(several))


def _number(weight: Any, token: int, who: str) -> float:
    try:
        return float(weight)
    except Exception:  # boundary: anything may be asked for a number, and refuse as it likes
        raise RoundsError(f"{who} gave token {token} a weight of {_shown(weight)}, which is no number") from None


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # boundary: what does not say what it is still has a kind
        return f"a {type(value).__name__}"


def left_out(ledger: Ledger) -> Iterator[bool]:
    """Of each id, whether a plug-in said that nothing is to be learned from it."""
    for entry in ledger:
        spans = entry.info.get(LEFT_OUT, ())
        yield from (any(start <= place < stop for start, stop in spans) for place in range(len(entry.ids)))
