"""A reward function written for ms-swift is asked as ms-swift asks it: all attempts of a group at once, by columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from gateway.errors import ConfigError
from gateway.feedback.base import plain_text
from trainer.ledger import Message
from trainer.reward.attempt import Attempt
from trainer.swift.orm import orms
from trainer.swift.plugins import arguments, made, ran, registered
from trainer.swift.trajectory import CHAT


class Named:
    """What plug-in files register under a name in `orms`; found before anything starts, and made once."""

    def __init__(self) -> None:
        self._made: dict[str, Callable[..., Any]] = {}

    def ready(self, name: str, plugins: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> Any:
        key = repr((name, tuple(plugins), options))
        if key not in self._made:
            field = "reward.components"
            files = ran(plugins, f"{field}.args.plugins")
            found = registered(orms, name, files, f"{field}.args.name", "reward function")
            function = made(found, f"{field}.args.name", args=arguments(options or {}), **(options or {}))
            if not callable(function):
                problem, place = f"`orms[{name!r}]` cannot be called", ", ".join(map(str, files))
                raise ConfigError(
                    problem, file=place, field=field, remedy="define `__call__(self, completions, **kwargs)`"
                )
            self._made[key] = function
        return self._made[key]

    def __call__(
        self,
        attempts: list[Attempt],
        name: str,
        plugins: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        columns = asked(attempts, int((options or {}).get("max_steps", 0)))
        given = self.ready(name, plugins, options)(**columns)
        return _awaited(given) if inspect.isawaitable(given) else _numbers(given)


async def _awaited(given: Any) -> Any:
    return _numbers(await given)


def _numbers(given: Any) -> Any:
    """None is for what a function has nothing to say of, and adds nothing."""
    return [0.0 if value is None else value for value in given] if isinstance(given, list | tuple) else given


named = Named()


def gym(attempt: Attempt) -> float:
    """What the environment gave, over all turns."""
    if "total_reward" not in attempt.infos:
        raise ValueError("the rollout has no `total_reward`: its scheduler plays no environment")
    return float(attempt.infos["total_reward"])


def asked(attempts: Sequence[Attempt], max_steps: int = 0) -> dict[str, Any]:
    """By column, the rows' own under those of ms-swift."""
    names = dict.fromkeys(name for attempt in attempts for name in attempt.columns)
    columns = {name: [attempt.columns.get(name) for attempt in attempts] for name in names}
    chats = [chat(attempt) for attempt in attempts]
    infos = [{key: value for key, value in attempt.infos.items() if key != CHAT} for attempt in attempts]
    versions = [version for attempt in attempts for version in attempt.rollout.versions]
    requests = [attempt.rollout.name for attempt in attempts]
    rows = zip(requests, attempts, chats, infos, strict=True)
    return columns | {
        "completions": [str(messages[-1]["content"]) if messages else "" for messages in chats],
        "messages": chats,
        "is_truncated": [attempt.truncated for attempt in attempts],
        "finish_reason": ["length" if attempt.truncated else "stop" for attempt in attempts],
        "rollout_infos": infos,
        "multi_turn_infos": infos,
        "response_token_ids": [[id for turn in attempt.turns for id in turn.ids] for attempt in attempts],
        "prompt_id": [attempt.task.id for attempt in attempts],
        "request_id": requests,
        "trajectory_inputs": {
            request: [{**attempt.columns, "messages": said, "rollout_infos": told, "request_id": request}]
            for request, attempt, said, told in rows
        },
        "trainer_state": SimpleNamespace(global_step=max(versions, default=0), max_steps=max_steps),
    }


def chat(attempt: Attempt) -> list[dict[str, Any]]:
    """The whole chat in text, as the scheduler had it; where there was none, told from the ledger."""
    known = attempt.infos.get(CHAT)
    return list(known) if known is not None else [_flat(message) for message in attempt.messages]


def _flat(message: Message) -> dict[str, Any]:
    content, thought = plain_text(message.get("content")), message.get("reasoning_content")
    told = {key: value for key, value in message.items() if key not in ("content", "reasoning_content")}
    return told | {"content": f"<think>{thought}</think>{content}" if thought else content}
