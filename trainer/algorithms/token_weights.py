"""Token weights: which of the policy's tokens are trained, and how much (`algorithm.credit.trained_turns`).

Tokens of tools, feedback and the task are masked: a function that gives them a weight is an error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from gateway.errors import ConfigError, OperatorError, UserCodeError, format_error, safe_repr
from gateway.user_code import UserCode
from trainer.ledger import Ledger
from trainer.load_plugin import load_plugin
from trainer.rollout.rollout import EXCLUDED_SPANS

SETTING = "algorithm.credit.trained_turns"
TokenWeightFn = Callable[[Ledger], Sequence[float]]
"""Returns a weight of 0 or more for each token; 0 for tokens that the policy did not write. The ledgers of a rollout
that has several come as one, end to end."""
MAX_EXCERPT = 500
"""Characters of a user function's error that are shown."""
REMEDY = "fix that function, then continue with --resume from the last saved step"


class TokenWeightError(OperatorError):
    """A user's function returned no valid weights. The step is not made, and no weight changes."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{SETTING}: {problem}\n  remedy: {REMEDY}")


def weigh_all_turns(ledger: Ledger) -> tuple[float, ...]:
    """Weighs all tokens of the policy 1."""
    return tuple(map(float, ledger.mask))


def weigh_last_turn(ledger: Ledger) -> tuple[float, ...]:
    """Weighs the tokens of the policy's last turn 1."""
    turns = ledger.turns
    return tuple(float(bool(turns) and entry is turns[-1]) for entry in ledger for _ in entry.ids)


TOKEN_WEIGHT_FNS: Mapping[str, TokenWeightFn] = {"all": weigh_all_turns, "last": weigh_last_turn}


def load_token_weight_fn(name: str) -> TokenWeightFn:
    """Resolves `all`, `last`, or a user's function as `module:function` or `file.py:function`."""
    if known := TOKEN_WEIGHT_FNS.get(name):
        return known
    names = ", ".join(TOKEN_WEIGHT_FNS)
    remedy = f"write {names}, or module:function with a function that returns a number for each token of a ledger"
    if ":" not in name:
        raise ConfigError(f"unknown turns {name!r}", field=SETTING, remedy=remedy)
    function: TokenWeightFn = load_plugin(name, SETTING)
    if not callable(function):
        raise ConfigError(f"{name!r} is not a function", field=SETTING, remedy=remedy)
    return function


def bind_decoder(function: TokenWeightFn, decode: Callable[[Sequence[int]], str]) -> TokenWeightFn:
    """Gives the function a way to decode ids, if it has a method `with_decoder`."""
    with_decoder: Callable[[Callable[[Sequence[int]], str]], TokenWeightFn] | None
    with_decoder = getattr(function, "with_decoder", None)
    return function if with_decoder is None else with_decoder(decode)


def compute_token_weights(ledger: Ledger, function: TokenWeightFn, rollout_name: str) -> tuple[float, ...]:
    """Calls the function and checks its weights; excluded spans get a weight of 0."""
    function_name = getattr(function, "__name__", type(function).__name__)
    where = f"rollout {rollout_name}: {function_name}"
    weights = _call_user_function(ledger, function, where)
    if len(weights) != len(ledger):
        raise TokenWeightError(f"{where} returned {len(weights)} weights for {len(ledger)} tokens")
    for token, (weight, is_policy) in enumerate(zip(weights, ledger.mask, strict=True)):
        if not isfinite(weight) or weight < 0:
            raise TokenWeightError(f"{where} gave token {token} a weight of {weight}; it must be 0 or more")
        if weight and not is_policy:
            author = ledger.author_at(token)
            raise TokenWeightError(f"{where} gave token {token} a weight, but the {author} wrote it, not the policy")
    excluded = excluded_tokens(ledger)
    return tuple(0.0 if is_excluded else weight for is_excluded, weight in zip(excluded, weights, strict=True))


def _call_user_function(ledger: Ledger, function: TokenWeightFn, where: str) -> tuple[float, ...]:
    """Returns the function's numbers. It may be a generator, so reading it runs the user's code too."""
    try:
        with UserCode():
            returned: Any = function(ledger)
            values = tuple(returned) if isinstance(returned, Iterable) else None
    except Exception as error:  # boundary: a user's function may raise anything
        raised = error.error if isinstance(error, UserCodeError) else error
        frame = traceback.extract_tb(raised.__traceback__)[-1]
        excerpt = format_error(error)[:MAX_EXCERPT]
        raise TokenWeightError(f"{where} raised {excerpt} ({frame.filename}:{frame.lineno})") from error
    if values is None:
        raise TokenWeightError(f"{where} returned {safe_repr(returned)}, not a list of {len(ledger)} numbers")
    return tuple(_to_float(weight, token, where) for token, weight in enumerate(values))


def _to_float(weight: Any, token: int, where: str) -> float:
    try:
        with UserCode():
            return float(weight)
    except Exception:  # boundary: a user's object may raise anything when converted
        raise TokenWeightError(f"{where} gave token {token} a weight of {safe_repr(weight)}, not a number") from None


def excluded_tokens(ledger: Ledger) -> Iterator[bool]:
    """Whether each token was excluded from training by a plug-in."""
    for entry in ledger:
        spans = entry.info.get(EXCLUDED_SPANS, ())
        yield from (any(start <= index < stop for start, stop in spans) for index in range(len(entry.ids)))
