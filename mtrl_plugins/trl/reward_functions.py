"""Calls reward functions written for TRL: all of them once for a group; each reward component gets its column."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from math import fsum
from typing import Any

import anyio
from anyio import to_thread
from PIL import Image as Pillow
from transformers import TrainerState

from gateway.await_user_code import await_user_code
from gateway.errors import ConfigError, safe_repr
from gateway.types import Image
from gateway.user_code import UserCode
from gateway.wire import to_plain
from mtrl_plugins.trl.caller_thread import CallerThread, DeadlinePassed
from mtrl_plugins.trl.rows import PROMPT
from trainer.ledger import COPIED, Entry, Ledger, Message
from trainer.reward.attempt import Attempt, own_ledgers
from trainer.reward.scorer import GivenRewards
from trainer.rollout.rollout import Rollout

OWN_ARGUMENTS = (PROMPT, "completion", "completion_ids")
"""Columns that are not passed on."""
Chat = list[dict[str, Any]]


def reward_arguments(attempts: Sequence[Attempt], columns: Sequence[str]) -> dict[str, Any]:
    """The arguments for a group's attempts; `columns` are those of the data set."""
    names = [name for name in columns if name not in OWN_ARGUMENTS]
    return {
        "prompts": [_prompt(attempt) for attempt in attempts],
        "completions": [_completion(attempt) for attempt in attempts],
        "completion_ids": [attempt.response_ids[0] for attempt in attempts],
        **{name: [attempt.columns.get(name) for attempt in attempts] for name in names},
    }


def has_text_prompt(attempt: Attempt) -> bool:
    """Whether the row's prompt is a text, and not a chat."""
    return isinstance(attempt.columns.get(PROMPT), str)


def _prompt(attempt: Attempt) -> str | Chat:
    if has_text_prompt(attempt):
        return str(attempt.columns[PROMPT])
    opening = _opening(attempt)
    images = iter(Ledger((opening,)).images)
    return [_with_images(message, images) for message in opening.messages]


def _opening(attempt: Attempt) -> Entry:
    """The chat before the policy's first turn, with what an environment added to it."""
    return own_ledgers(attempt.rollout)[0].entries[0]


def _completion(attempt: Attempt) -> str | Chat:
    """What follows the prompt in all chats but those of sub-agents, once: the last message is the rollout's answer."""
    if has_text_prompt(attempt):
        return attempt.response
    opening = _opening(attempt)
    names: dict[str, str] = {}
    known, chat = [*opening.messages], []
    for ledger in own_ledgers(attempt.rollout):
        for entry in ledger:
            if entry is opening or COPIED in entry.info or not entry.ids:
                continue
            images = iter(Ledger((entry,)).images)
            for message in entry.messages:
                shown = _with_images(message, images)
                if entry is ledger.entries[0] and message in known:
                    continue  # A later chat begins with what it keeps.
                known.append(message)
                is_turn = message["role"] == "assistant"
                chat.append(_assistant_message(message, names) if is_turn else _tool_message(shown, names))
    return chat


def _assistant_message(message: Message, names: dict[str, str]) -> dict[str, Any]:
    """A turn of the policy, with its calls as TRL has them; their names are kept for the answers."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        names[call["id"]] = function["name"]
        calls.append({"type": "function", "function": {**function, "arguments": _arguments(function["arguments"])}})
    reasoning = {key: message[key] for key in ("reasoning_content",) if key in message}
    content = {"role": "assistant", "content": message.get("content") or ""} | reasoning
    return content | {"tool_calls": calls} if calls else content


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text or "{}") if isinstance(text, str) else text
    except ValueError:  # The policy's text is not JSON, and stays as it is.
        return text


def _tool_message(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    if message["role"] != "tool":
        return dict(message)
    return {"role": "tool", "name": names.get(message.get("tool_call_id", ""), ""), "content": message["content"]}


def _with_images(message: Message, media: Any) -> dict[str, Any]:
    """The message with PIL images where its placeholders are."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [_image_part(next(media, None)) if part.get("type") == "image" else dict(part) for part in content]
    return {**message, "content": parts}


def _image_part(image: Image | None) -> dict[str, Any]:
    if image is None:
        return {"type": "image"}
    return {"type": "image", "image": Pillow.open(BytesIO(image.data))}


RewardFunction = Callable[..., Any]
PREFIX = "reward_funcs"
"""Begins the names that stand for reward functions in settings."""
COLUMN_HINT = "return a list with a number, or None, for each completion"


@dataclass(frozen=True)
class Progress:
    """From steps of a run to the optimizer updates and epochs that TRL counts."""

    updates_per_step: int
    max_steps: int
    steps_per_epoch: float
    epochs: float

    def state(self, steps: int) -> TrainerState:
        """TRL's `trainer_state` after a number of steps."""
        return TrainerState(
            global_step=steps * self.updates_per_step,
            max_steps=self.max_steps,
            epoch=steps / self.steps_per_epoch,
            num_train_epochs=max(1, round(self.epochs)),
        )


@dataclass
class RewardFunctions:
    """The reward functions of a run. Each is a component; the first that is asked for calls all of them."""

    functions: Mapping[str, RewardFunction]
    """By the names of their components."""
    caller: CallerThread
    columns: Sequence[str]
    timeout_s: float
    progress: Progress
    environments: Callable[[Sequence[Attempt]], list[Any]] | None = None
    """Returns the environment of each attempt, if there are any."""
    release: Callable[[Sequence[Rollout]], None] = lambda _: None
    """Called with the rollouts of a group that needs its environments no longer."""
    _scores: dict[str, dict[str, float | Exception | None]] = field(default_factory=dict)
    """By rollout, the score of each function."""
    _logged: dict[str, list[float]] = field(default_factory=dict)

    def as_given(self) -> GivenRewards:
        """The functions for the scorer, under the names that settings have for them."""
        functions = {f"{PREFIX}.{name}": self._make_component(name) for name in self.functions}
        return GivenRewards(functions, self._on_scored, self.take_metrics)

    def take_metrics(self) -> dict[str, float]:
        """The means of what was passed to `log_metric` since the last call."""
        logged, self._logged = self._logged, {}
        return {f"logged/{name}": fsum(values) / len(values) for name, values in logged.items()}

    def _make_component(self, name: str) -> RewardFunction:
        async def score(attempts: list[Attempt]) -> list[float | None]:
            if any(attempt.rollout.name not in self._scores for attempt in attempts):
                await self._call_all(attempts)
            columns = [self._scores[attempt.rollout.name] for attempt in attempts]
            error = next((column[name] for column in columns if isinstance(column[name], Exception)), None)
            if isinstance(error, Exception):
                raise error
            # Where every function abstains, None leaves the rollout out of its group; elsewhere it adds nothing.
            abstained = [all(score is None for score in column.values()) for column in columns]
            scores = [column[name] for column in columns]
            return [None if left_out else _number(score) for score, left_out in zip(scores, abstained, strict=True)]

        return score

    async def _call_all(self, attempts: Sequence[Attempt]) -> None:
        """Calls every function: synchronous ones on the caller's thread, in order, and async ones together."""
        arguments = reward_arguments(attempts, self.columns) | self._own_arguments(attempts)
        results: dict[str, list[Any] | Exception] = {}

        async def call(name: str, function: RewardFunction) -> None:
            try:
                results[name] = _check_column(await self._call(function, arguments), len(attempts))
            except Exception as error:  # user code: an exception costs this function's scores
                results[name] = error

        async with anyio.create_task_group() as tasks:
            for name, function in self.functions.items():
                if _is_async(function):
                    tasks.start_soon(call, name, function)
            for name, function in self.functions.items():
                if not _is_async(function):
                    await call(name, function)
        for index, attempt in enumerate(attempts):
            self._scores[attempt.rollout.name] = {
                name: result if isinstance(result, Exception) else result[index]
                for name, result in ((name, results[name]) for name in self.functions)
            }

    async def _call(self, function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
        if _is_async(function):
            with anyio.move_on_after(self.timeout_s), UserCode():
                return await await_user_code(function(**arguments))
            raise DeadlinePassed(f"no answer within {self.timeout_s:g} s")
        call = partial(self.caller.call, function, self.timeout_s, **arguments)
        value = await to_thread.run_sync(call, abandon_on_cancel=True)
        with UserCode():
            return await await_user_code(value) if isinstance(value, Awaitable) else value

    def _own_arguments(self, attempts: Sequence[Attempt]) -> dict[str, Any]:
        """The arguments that are the trainer's: its state, functions to log with, and environments."""
        steps = max((version for attempt in attempts for version in attempt.rollout.versions), default=0)
        own: dict[str, Any] = {
            "trainer_state": self.progress.state(steps),
            "log_extra": partial(_log_extra, attempts),
            "log_metric": self._log_metric,
        }
        return own if self.environments is None else own | {"environments": self.environments(attempts)}

    def _log_metric(self, name: str, value: float) -> None:
        self._logged.setdefault(str(name), []).append(float(value))

    def _on_scored(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._scores.pop(rollout.name, None)
        self.release(rollouts)


def name_functions(functions: Any) -> dict[str, RewardFunction]:
    """The functions by name: a function, or a list of them. Raises ConfigError for reward models."""
    named: dict[str, RewardFunction] = {}
    listed = list(functions) if isinstance(functions, list | tuple) else [] if functions is None else [functions]
    for index, function in enumerate(listed):
        if isinstance(function, str) or not callable(function) or hasattr(function, "state_dict"):
            kind = "a reward model" if isinstance(function, str) or callable(function) else "not a function"
            remedy = "pass a function that asks the model, such as over HTTP"
            raise ConfigError(f"{function!r:.60} is {kind}", field=f"reward_funcs[{index}]", remedy=remedy)
        inner = function.func if isinstance(function, partial) else function
        name = str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")
        named[unique_name(name, named)] = function
    return named


def unique_name(name: str, taken: Mapping[str, Any]) -> str:
    """A component's name that is not taken."""
    plain = re.sub(r"[^\w./-]", "_", name).lstrip("./-") or "reward"
    plain = f"{plain}_reward" if plain in ("mean", "std", "failed") else plain
    numbers = (f"{plain}_{number}" for number in range(2, len(taken) + 3))
    return plain if plain not in taken else next(name for name in numbers if name not in taken)


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_column(values: Any, count: int) -> list[Any]:
    try:
        column = list(values.tolist() if hasattr(values, "tolist") else values)
    except Exception:  # boundary: a user's object may raise anything when converted
        raise TypeError(f"returned {safe_repr(values)}; {COLUMN_HINT}") from None
    if len(column) != count:
        raise ValueError(f"returned {len(column)} rewards for {count} completions; {COLUMN_HINT}")
    return column


def _number(score: Any) -> float:
    """A score; 0 for None, and for NaN, with which a function abstains too."""
    return 0.0 if score is None or score != score else score


def _log_extra(attempts: Sequence[Attempt], column: str, values: Sequence[Any]) -> None:
    """Keeps a value with each rollout, beside what plug-ins passed on."""
    for attempt, value in zip(attempts, values, strict=False):
        if isinstance(attempt.rollout.infos, dict):  # The rollout's own, before it is written.
            attempt.rollout.infos[str(column)] = to_plain(value)
