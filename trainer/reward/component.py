"""Calls one reward function with its deadline. Whatever user code does costs its rollout, never the run."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import anyio
from pydantic import TypeAdapter, ValidationError

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError, UserCodeError, format_error, safe_repr, unwrap_error
from gateway.native.thread_pool import ThreadPool
from gateway.native.tool_results import is_plain
from gateway.plugins import find_all, find_missing
from gateway.user_code import UserCode
from trainer.load_plugin import load_plugin
from trainer.reward.attempt import MEANT_ATTRIBUTES, Attempt
from trainer.reward.function_runner import DeadlineExceeded, FunctionRunner
from trainer.reward.functions import BUILTIN_FUNCTIONS
from trainer.reward.settings import ComponentSettings

MAX_REWARD = 1e15
"""Larger rewards are refused: the square of a much larger one overflows single precision."""
TRAJECTORY_PARAMETERS = ("trajectory", "trajectories")
"""A function whose first parameter has one of these names is given dicts instead of attempts."""
MAX_EXCERPT = 500
"""Characters of a user function's error that are shown."""
NO_ANSWER = "returned nothing within"
"""How the text about a function that took too long begins."""


FOREIGN_PARAMETERS = {
    "solution_str": (
        "verl",
        "write `function: mtrl_plugins.verl.reward_function:custom`, `args: {{path: {path}, name: {name}}}`",
    ),
    "completions": (
        "ms-swift and TRL",
        "register it in its file, `orms['mine'] = ...`, and name it so: `function: mtrl_plugins.swift.orm:named`,"
        " `batched: true`, `args: {{name: mine, plugins: [{path}]}}`; or train from Python, as with TRL:"
        " `mtrl_plugins.trl.api:GRPOTrainer(reward_funcs={name}, ...)`",
    ),
}
"""By a parameter that only they have: whose reward functions these are, and the form in which they work here."""
RewardFn = Callable[..., Any]
Result = TypeVar("Result")


class ScoringError(Exception):
    """A component gave no valid number; the text is for the operator."""


class SharedLimits:
    """The limiter and the threads that the components of a scorer share."""

    def __init__(self, max_calls: int = 64) -> None:
        self.limiter = anyio.CapacityLimiter(max_calls)
        """Limits concurrent calls, so that no deadline passes while a call is queued for a thread."""
        self.threads = ThreadPool()
        """Has more threads than that, since functions that hang keep theirs."""


class Component:
    """One component of the reward: a function, its arguments and its deadline."""

    def __init__(
        self,
        name: str,
        settings: ComponentSettings,
        folder: Path | None,
        limits: SharedLimits,
        given: RewardFn | None = None,
    ) -> None:
        """`given` is the function itself, if it is not to be found by its name."""
        self.name, self.settings, self.limits = name, settings, limits
        self.field = f"reward.components.{name}"
        self.is_builtin = settings.function in BUILTIN_FUNCTIONS
        self.function: RewardFn = self._load_function(folder) if given is None else given
        self._first_parameter = next(iter(_parameters(self.function)), "")
        self._runner = FunctionRunner(self.function, limits.threads)
        self._check_signature()

    @property
    def reads_truth(self) -> bool:
        """Whether a function of the user's reads `attempt.truth`, as far as its own code shows."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return not self.is_builtin and code is not None and "truth" in code.co_names

    async def score(self, attempts: Sequence[Attempt]) -> list[float | ScoringError]:
        """Scores the attempts of a group: a number for each, or the reason why there is none."""
        if self.settings.batched:
            return await self._score_together(attempts)
        results: list[float | ScoringError] = [ScoringError("not scored")] * len(attempts)

        async def score(index: int) -> None:
            results[index] = await self._score_alone(attempts[index])

        async with anyio.create_task_group() as tasks:
            for index in range(len(attempts)):
                tasks.start_soon(score, index)
        return results

    async def _score_alone(self, attempt: Attempt) -> float | ScoringError:
        where = f"rollout {attempt.rollout.name}"
        try:
            return await self._convert_result(self._to_number, await self._call(attempt, where), where)
        except ScoringError as error:
            return error

    async def _score_together(self, attempts: Sequence[Attempt]) -> list[float | ScoringError]:
        where = "rollouts " + ", ".join(attempt.rollout.name for attempt in attempts)
        try:
            value = await self._call(list(attempts), where)
            values = await self._convert_result(self._to_list, value, len(attempts), where)
        except ScoringError as error:
            return [error] * len(attempts)
        results: list[float | ScoringError] = []
        for attempt, value in zip(attempts, values, strict=True):
            try:
                results.append(await self._convert_result(self._to_number, value, f"rollout {attempt.rollout.name}"))
            except ScoringError as error:
                results.append(error)
        return results

    async def _call(self, argument: Attempt | list[Attempt], where: str) -> Any:
        """Calls the reward function."""
        try:
            if self.is_builtin:  # These only walk over the ledger; a thread would cost more than the work.
                return self.function(argument, **self.settings.args)
            async with self.limits.limiter:
                return await self._runner.call(self.settings.timeout_s, self._convert(argument), **self.settings.args)
        except DeadlineExceeded:
            raise self._error(f"{NO_ANSWER} {self.settings.timeout_s:g} s, its `timeout_s`", where) from None
        except Exception as error:  # boundary: a user's function may raise anything
            raise self._error(f"raised {_describe_error(error, self.is_builtin)}", where) from error

    def _convert(self, argument: Attempt | list[Attempt]) -> Any:
        """The argument in the form that the function's first parameter names: attempts, or trajectories as dicts."""
        if self._first_parameter not in TRAJECTORY_PARAMETERS:
            return argument
        return [attempt.trajectory for attempt in argument] if isinstance(argument, list) else argument.trajectory

    async def _convert_result(self, convert: Callable[..., Result], value: Any, *args: Any) -> Result:
        """Converts a value. Methods of an object that a user wrote run in a thread, with the function's deadline."""
        if is_plain(value) or inspect.iscoroutine(value):
            return convert(value, *args)
        where = args[-1]
        with anyio.move_on_after(self.settings.timeout_s):
            try:
                result: Result = await self.limits.threads.run(convert, value, *args)
                return result
            except UserCodeError as error:
                raise self._error(f"returned a value that raised {_describe_error(error, False)}", where) from error
        raise self._error(f"returned a value that was not a number within {self.settings.timeout_s:g} s", where)

    def _to_number(self, value: Any, where: str) -> float:
        """Accepts finite numbers and booleans, including those of numpy and torch, but no text."""
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except Exception:  # boundary: a user's object may raise anything when converted
            number = math.nan
        if not abs(number) <= MAX_REWARD:
            raise self._error(f"returned {safe_repr(value)}, which is not a usable number", where)
        return number

    def _to_list(self, value: Any, count: int, where: str) -> Sequence[Any]:
        """Accepts a list, a tuple, or an array of numpy or torch."""
        try:
            values = value if isinstance(value, list | tuple) else list(value.tolist())
        except Exception:  # boundary: as above
            raise self._error(f"returned {safe_repr(value)}, not a list of {count} numbers", where) from None
        if len(values) != count:
            raise self._error(f"returned {len(values)} numbers for {count} rollouts", where)
        return values

    def _error(self, problem: str, where: str) -> ScoringError:
        return ScoringError(f"component {self.name!r} ({self.settings.function}) {problem}; {where}")

    def _load_function(self, folder: Path | None) -> Callable[..., Any]:
        name, field = self.settings.function, f"{self.field}.function"
        if self.is_builtin:
            return BUILTIN_FUNCTIONS[name]
        if name in (rewards := find_all(lambda plugin: plugin.rewards)):
            name = rewards[name]
        if ":" not in name and "." not in name:
            if missing := find_missing(name):
                remedy = "install mtrl with all of its plug-ins"
                raise ConfigError(f"{name!r} needs the plug-in {missing!r}", field=field, remedy=remedy)
            close = closest_match(name, BUILTIN_FUNCTIONS.keys() | rewards)
            names = ", ".join([*BUILTIN_FUNCTIONS, *rewards])
            remedy = f"did you mean {close!r}?" if close else f"use one of {names}, or `rewards.py:{name}`"
            raise ConfigError(f"unknown reward function {name!r}", field=field, remedy=remedy)
        loaded = load_plugin(name, field, folder)
        if isinstance(loaded, type):
            loaded = _make_instance(loaded, name, field)
        if not callable(loaded):
            remedy = "name a function, or a class or an instance with `__call__`"
            raise ConfigError(f"{name!r} is a {type(loaded).__name__}, not a function", field=field, remedy=remedy)
        function: Callable[..., Any] = loaded
        return function

    def _check_signature(self) -> None:
        """Checks that the function accepts the configured arguments."""
        name, args = self.settings.function, self.settings.args
        parameters = _parameters(self.function)
        for parameter, (owners, form) in FOREIGN_PARAMETERS.items():
            if parameter in parameters:
                path, _, function = name.rpartition(":")
                problem = f"{name!r} takes `{parameter}`, as reward functions of {owners} do"
                remedy = form.format(path=path, name=function)
                raise ConfigError(problem, field=f"{self.field}.function", remedy=remedy)
        if self.is_builtin and self.settings.batched:
            raise ConfigError(f"{name!r} scores one attempt", field=f"{self.field}.batched", remedy="leave it out")
        try:
            signature = inspect.signature(self.function)
            signature.bind(None, **args)
        except TypeError as error:
            parameter = "attempts" if self.settings.batched else "attempt"
            definition = f"def {name.rpartition(':')[2]}({', '.join([parameter, *args])})"
            remedy = f"define it as `{definition}`, or correct `args`"
            if self.is_builtin:
                known = ", ".join(list(inspect.signature(self.function).parameters)[1:])
                remedy = f"its arguments are: {known}" if known else "it takes no `args`; leave them out"
            raise ConfigError(
                f"{name!r} takes {signature}: {error}", field=f"{self.field}.args", remedy=remedy
            ) from error
        except ValueError:  # A function in C has no signature.
            return
        if ready := getattr(self.function, "ready", None):  # It checks its arguments before anything starts.
            ready(**args)
        if self.is_builtin:
            self._check_builtin_args(args)

    def _check_builtin_args(self, args: dict[str, Any]) -> None:
        hints = get_type_hints(self.function, include_extras=True)
        for key, value in args.items():
            try:
                TypeAdapter(hints[key]).validate_python(value, strict=True)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ConfigError(problem, field=f"{self.field}.args.{key}", remedy=f"correct `{key}`") from None


def _make_instance(kind: type, name: str, field: str) -> Any:
    """An instance of a class that takes no arguments."""
    try:
        with UserCode():
            return kind()
    except Exception as error:  # boundary: a user's own `__init__` may raise anything
        problem = f"{name!r} cannot be instantiated without arguments: {_describe_error(error, is_builtin=False)}"
        raise ConfigError(problem, field=field, remedy="name an instance of it") from error


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters; empty if it has no signature."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _describe_error(error: BaseException, is_builtin: bool) -> str:
    error = unwrap_error(error)
    text = format_error(error)[:MAX_EXCERPT]
    if isinstance(error, AttributeError) and isinstance(error.obj, Attempt):
        meant = MEANT_ATTRIBUTES.get(str(error.name))
        text += f"; did you mean `attempt.{meant}`?" if meant else ""
    frames = [] if is_builtin else traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
