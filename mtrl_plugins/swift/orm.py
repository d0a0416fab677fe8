"""ms-swift's reward functions (`ORM`), called once for all attempts of a group with ms-swift's columns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError, describe_exception
from mtrl_plugins.swift.math_accuracy import AnswerComparer
from mtrl_plugins.swift.protocol import CHAT_INFO
from trainer.load_plugin import load_plugin
from trainer.reward.attempt import Attempt

DEFAULT_ARGUMENTS: Mapping[str, Any] = {
    "soft_max_length": None,
    "soft_cache_length": None,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
    "reward_model_plugin": None,
    "seed": 42,
}
"""Arguments of a run that reward functions read, with ms-swift's defaults."""


def load_plugin_files(plugins: str | Sequence[str], field: str) -> list[Path]:
    """Runs the plug-in files, each once."""
    files = [plugins] if isinstance(plugins, str) else list(plugins)
    for file in files:
        load_plugin(f"{file}:__name__", field)
    return [Path(file) for file in files]


def find_registered(registry: Mapping[str, Any], name: Any, field: str, what: str, files: Sequence[Path] = ()) -> Any:
    """The object registered under a name; raises ConfigError with similar names."""
    if name in registry:
        return registry[name]
    near = closest_match(str(name), registry)
    hint = f"did you mean {near!r}?" if near else f"registered are {', '.join(registry) or 'none'}"
    place = ", ".join(map(str, files)) or None
    raise ConfigError(
        f"unknown {what} {name!r}", file=place, field=field, remedy=f"register it in a plug-in file; {hint}"
    )


def instantiate(plugin: Any, field: str, **arguments: Any) -> Any:
    """An instance of a class, with those arguments that its `__init__` accepts; other objects are returned as is."""
    if not isinstance(plugin, type):
        return plugin
    try:
        return plugin(**_accepted_arguments(plugin, arguments))
    except ConfigError:
        raise
    except Exception as error:  # boundary: a user's own `__init__` may raise anything
        place = inspect.getsourcefile(plugin) if plugin.__module__ != "builtins" else None
        problem = f"{plugin.__name__} cannot be instantiated: {describe_exception(error)}"
        raise ConfigError(problem, file=place, field=field, remedy="see its `__init__`") from error


def build_arguments(options: Mapping[str, Any]) -> SimpleNamespace:
    """The run's arguments for reward functions."""
    return SimpleNamespace(**{**DEFAULT_ARGUMENTS, **options})


def _accepted_arguments(plugin: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(plugin).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


class ORM:
    """The base class of reward functions."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} has no `__call__`")


class AsyncORM:
    """The base class of async reward functions."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    async def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} has no `__call__`")


class Format(ORM):
    """1 if the completion is `<think>...</think><answer>...</answer>` and nothing else."""

    shape = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>\Z", re.DOTALL)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:  # type: ignore[override]
        return [float(bool(self.shape.match(text))) for text in completions]


class ReActFormat(Format):
    """1 if the completion is thinking followed by an action with its input."""

    shape = re.compile(r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$", re.DOTALL | re.MULTILINE)


class SoftOverlong(ORM):
    """0 up to `soft_max_length - soft_cache_length` policy tokens, then falling linearly to -1 at `soft_max_length`."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.most, self.margin = int(args.soft_max_length), int(args.soft_cache_length)
        if not 0 < self.margin < self.most:
            raise ValueError(
                f"soft_cache_length ({self.margin}) must be positive and below soft_max_length ({self.most})"
            )

    def __call__(self, response_token_ids: list[list[int]], **kwargs: Any) -> list[float]:  # type: ignore[override]
        start = self.most - self.margin
        return [min(0.0, (start - len(ids)) / self.margin) for ids in response_token_ids]


class RepetitionPenalty(ORM):
    """The share of repeated n-grams of `repetition_n_grams` words, times `repetition_max_penalty`."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.size, self.most = int(args.repetition_n_grams), float(args.repetition_max_penalty)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:  # type: ignore[override]
        return [self._cost(text.lower().split()) for text in completions]

    def _cost(self, words: list[str]) -> float:
        ngrams = [tuple(words[start : start + self.size]) for start in range(len(words) - self.size + 1)]
        return (1 - len(set(ngrams)) / len(ngrams)) * self.most if ngrams else 0.0


class MathAccuracy(ORM):
    """1 if the answer equals the solution according to `math_verify`, an optional dependency."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self._comparer = AnswerComparer()

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:  # type: ignore[override]
        return [self._comparer.compare(text, truth) for text, truth in zip(completions, solution, strict=True)]


orms: dict[str, Any] = {
    "accuracy": MathAccuracy,
    "format": Format,
    "react_format": ReActFormat,
    "repetition": RepetitionPenalty,
    "soft_overlong": SoftOverlong,
}


class RegisteredReward:
    """Calls reward functions that plug-in files register in `orms`; each is instantiated once, before the run."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def ready(self, name: str, plugins: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> Any:
        key = repr((name, tuple(plugins), options))
        if key not in self._functions:
            field = "reward.components"
            files = load_plugin_files(plugins, f"{field}.args.plugins")
            registered = find_registered(orms, name, f"{field}.args.name", "reward function", files)
            function = instantiate(
                registered, f"{field}.args.name", args=build_arguments(options or {}), **(options or {})
            )
            if not callable(function):
                problem, place = f"`orms[{name!r}]` cannot be called", ", ".join(map(str, files))
                raise ConfigError(
                    problem, file=place, field=field, remedy="define `__call__(self, completions, **kwargs)`"
                )
            self._functions[key] = _without_self(function)
        return self._functions[key]

    def __call__(
        self,
        attempts: list[Attempt],
        name: str,
        plugins: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        columns = reward_arguments(attempts, int((options or {}).get("max_steps", 0)))
        result = self.ready(name, plugins, options)(**columns)
        return _await_rewards(result) if inspect.isawaitable(result) else _replace_none(result)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain function of an object whose class forgot `self`: `def __call__(completions, **kwargs)`."""
    call = inspect.getattr_static(type(function), "__call__", None)
    is_plain = inspect.isfunction(call) and not inspect.isfunction(function)
    return call if is_plain and next(iter(inspect.signature(call).parameters), "") == "completions" else function


async def _await_rewards(result: Any) -> Any:
    return _replace_none(await result)


def _replace_none(rewards: Any) -> Any:
    """The rewards with 0 for None, with which a function abstains."""
    return [0.0 if value is None else value for value in rewards] if isinstance(rewards, list | tuple) else rewards


named = RegisteredReward()


def gym(attempt: Attempt) -> float:
    """The sum of the gym environment's rewards over all turns."""
    if "total_reward" not in attempt.infos:
        raise ValueError("the rollout has no `total_reward`: its scheduler does not run a gym environment")
    return float(attempt.infos["total_reward"])


def reward_arguments(attempts: Sequence[Attempt], max_steps: int = 0) -> dict[str, Any]:
    """The keyword arguments of ms-swift's reward functions: the rows' columns, overridden by ms-swift's own."""
    names = dict.fromkeys(name for attempt in attempts for name in attempt.columns)
    columns = {name: [attempt.columns.get(name) for attempt in attempts] for name in names}
    chats = [attempt_messages(attempt) for attempt in attempts]
    infos = [{key: value for key, value in attempt.infos.items() if key != CHAT_INFO} for attempt in attempts]
    versions = [version for attempt in attempts for version in attempt.rollout.versions]
    requests = [attempt.rollout.name for attempt in attempts]
    rows = zip(requests, attempts, chats, infos, strict=True)
    return columns | {
        "completions": [_completion(messages) for messages in chats],
        "messages": chats,
        "is_truncated": [attempt.truncated for attempt in attempts],
        "finish_reason": ["length" if attempt.truncated else "stop" for attempt in attempts],
        "rollout_infos": infos,
        "multi_turn_infos": infos,
        "response_token_ids": [[id for turn in attempt.turns for id in turn.ids] for attempt in attempts],
        "prompt_id": [attempt.task.id for attempt in attempts],
        "request_id": requests,
        "trajectory_inputs": {
            request: [{**attempt.columns, "messages": messages, "rollout_infos": info, "request_id": request}]
            for request, attempt, messages, info in rows
        },
        "trainer_state": SimpleNamespace(global_step=max(versions, default=0), max_steps=max_steps),
    }


def attempt_messages(attempt: Attempt) -> list[dict[str, Any]]:
    """The chat as text, turns as the policy wrote them: the scheduler's chat, or without one the attempt's."""
    messages = attempt.infos.get(CHAT_INFO)
    return attempt.verbatim_messages if messages is None else list(messages)


def _completion(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last turn of the policy."""
    return next((str(message["content"]) for message in reversed(messages) if message["role"] == "assistant"), "")
