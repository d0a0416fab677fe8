"""One function with its deadline. It is the user's own code: whatever it does costs its rollout, never the run."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import anyio
from pydantic import TypeAdapter, ValidationError

from gateway.config.mistakes import nearest
from gateway.errors import ConfigError, innermost
from gateway.native.thread import Threads
from trainer.plug import plug_in
from trainer.reward.apart import Apart, Late
from trainer.reward.attempt import Attempt
from trainer.reward.settings import ComponentSettings
from trainer.reward.shipped import SHIPPED

LARGEST = 1e15
"""A reward beyond this is a mistake: its square is still a number in single precision, and much more is none."""
SHOWN = 500
"""Characters of what a user's function raised or gave."""


class Unscored(Exception):
    """No number came; the text is for the operator."""


class Places:
    """What the components of a scorer share."""

    def __init__(self, most: int = 64) -> None:
        self.asked = anyio.CapacityLimiter(most)
        """Functions at once, so that no deadline passes in a queue."""
        self.threads = Threads()
        """Many more, for those that hang and keep theirs."""


class Component:
    def __init__(self, name: str, settings: ComponentSettings, folder: Path | None, places: Places) -> None:
        self.name, self.settings, self.places = name, settings, places
        self.field = f"reward.components.{name}"
        self.shipped = settings.function in SHIPPED
        self.function = self._found(folder)
        self._apart = Apart(self.function, places.threads)
        self._try_on()

    async def ask(self, attempts: Sequence[Attempt]) -> list[float | Unscored]:
        """A number for each, or why there is none."""
        if self.settings.batched:
            return await self._together(attempts)
        given: list[float | Unscored] = [Unscored("nobody asked")] * len(attempts)

        async def one(place: int) -> None:
            given[place] = await self._alone(attempts[place])

        async with anyio.create_task_group() as asking:
            for place in range(len(attempts)):
                asking.start_soon(one, place)
        return given

    async def _alone(self, attempt: Attempt) -> float | Unscored:
        who = f"rollout {attempt.rollout.name}"
        try:
            return self._number(await self._called(attempt, who), who)
        except Unscored as nothing:
            return nothing

    async def _together(self, attempts: Sequence[Attempt]) -> list[float | Unscored]:
        who = "rollouts " + ", ".join(attempt.rollout.name for attempt in attempts)
        try:
            values = self._several(await self._called(list(attempts), who), len(attempts), who)
        except Unscored as nothing:
            return [nothing] * len(attempts)
        given: list[float | Unscored] = []
        for attempt, value in zip(attempts, values, strict=True):
            try:
                given.append(self._number(value, f"rollout {attempt.rollout.name}"))
            except Unscored as nothing:
                given.append(nothing)
        return given

    async def _called(self, asked: Attempt | list[Attempt], who: str) -> Any:
        try:
            if self.shipped:  # No more than a walk over the ledger: a thread would cost more than the work.
                return self.function(asked, **self.settings.args)
            async with self.places.asked:
                return await self._apart.ask(self.settings.timeout_s, asked, **self.settings.args)
        except Late:
            raise self._unscored(f"gave nothing within {self.settings.timeout_s:g} s", who) from None
        except (Exception, SystemExit) as error:  # boundary: a user's function may raise anything, and a script may end
            raise self._unscored(f"raised {_told(innermost(error), self.shipped)}", who) from error

    def _number(self, value: Any, who: str) -> float:
        """Any finite number, a truth value, numpy's and torch's included; a text is none."""
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except Exception:  # boundary: anything may be asked for a number, and refuse as it likes
            number = math.nan
        if not abs(number) <= LARGEST:
            raise self._unscored(f"gave {_shown(value)}, which is no number that can be learned from", who)
        return number

    def _several(self, value: Any, count: int, who: str) -> Sequence[Any]:
        """A list, a tuple, or what numpy and torch make of one."""
        try:
            values = value if isinstance(value, list | tuple) else list(value.tolist())
        except Exception:  # boundary: as above
            raise self._unscored(f"gave {_shown(value)}, not a list of {count} numbers", who) from None
        if len(values) != count:
            raise self._unscored(f"gave {len(values)} numbers for {count} rollouts", who)
        return values

    def _unscored(self, what: str, who: str) -> Unscored:
        return Unscored(f"component {self.name!r} ({self.settings.function}) {what}; {who}")

    def _found(self, folder: Path | None) -> Callable[..., Any]:
        named, field = self.settings.function, f"{self.field}.function"
        if self.shipped:
            return SHIPPED[named]
        if ":" not in named and "." not in named:
            near = nearest(named, SHIPPED)
            known = f"did you mean {near!r}?" if near else f"name one of {', '.join(SHIPPED)}, or `rewards.py:{named}`"
            raise ConfigError(f"there is no function {named!r}", field=field, remedy=known)
        found = plug_in(named, field, folder)
        if isinstance(found, type) or not callable(found):
            kind = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
            remedy = "name a function, or an object with `__call__` that is made already"
            raise ConfigError(f"{named!r} is {kind}, not a function", field=field, remedy=remedy)
        function: Callable[..., Any] = found
        return function

    def _try_on(self) -> None:
        """Whether the function can be asked with these arguments."""
        named, args = self.settings.function, self.settings.args
        if self.shipped and self.settings.batched:
            raise ConfigError(f"{named!r} scores one attempt", field=f"{self.field}.batched", remedy="leave it out")
        try:
            signature = inspect.signature(self.function)
            signature.bind(None, **args)
        except TypeError as error:
            taken = "attempts" if self.settings.batched else "attempt"
            remedy = f"define it as `def {named.rpartition(':')[2]}({', '.join([taken, *args])})`, or correct `args`"
            told = f"{named!r} takes {signature}: {error}"
            raise ConfigError(told, field=f"{self.field}.args", remedy=remedy) from error
        except ValueError:  # Something built in, which does not tell what it takes.
            return
        if ready := getattr(self.function, "ready", None):  # It looks at its arguments before anything starts.
            ready(**args)
        if self.shipped:
            self._check(args)

    def _check(self, args: dict[str, Any]) -> None:
        hints = get_type_hints(self.function, include_extras=True)
        for key, value in args.items():
            try:
                TypeAdapter(hints[key]).validate_python(value, strict=True)
            except ValidationError as error:
                said = error.errors()[0]["msg"]
                raise ConfigError(said, field=f"{self.field}.args.{key}", remedy=f"correct `{key}`") from None


def _told(error: BaseException, shipped: bool) -> str:
    said = f"{type(error).__name__}: {error}"[:SHOWN]
    frames = [] if shipped else traceback.extract_tb(error.__traceback__)
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # boundary: what does not say what it is still has a kind
        return f"a {type(value).__name__}"
