"""Episodes of environments with `reset` and `step`: what every framework's episodes have in common."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from math import isfinite
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.types import Image, Part, Text
from mtrl_plugins.environments.host_process import EnvironmentFailed

MAX_PARTS = 64
"""Parts of one observation that are kept."""
MAX_TEXT = 2**20
"""Characters of one text that the policy reads."""


@dataclass(frozen=True, slots=True)
class EpisodeAnswer:
    """What an environment answers to `reset` or to an action."""

    parts: tuple[Part, ...]
    reward: float | None = None
    """None if the environment gave none."""
    terminated: bool = False
    """The environment came to an end."""
    truncated: bool = False
    """A limit of steps or of time ended it."""
    invalid: str = ""
    """Why the policy's action was none; nothing happened then."""


class Episode(Protocol):
    """One open episode."""

    async def step(self, tool: str, action: Mapping[str, Any]) -> EpisodeAnswer:
        """Takes an action: the arguments of a tool, or `{"text": ...}` if it has no name. Raises EnvironmentFailed."""
        ...


class EpisodeSource(Protocol):
    """Where episodes come from: a host process, or a server. One task enters and leaves it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The environment's tools, each with `name`, `description` and `parameters`."""
        ...

    def open(self, seed: int, options: Mapping[str, Any]) -> AbstractAsyncContextManager[tuple[Episode, EpisodeAnswer]]:
        """Begins an episode; the context ends it. Raises EnvironmentFailed."""
        ...


def read_answer(value: Any, owner: str) -> EpisodeAnswer:
    """An answer of a host process. Raises EnvironmentFailed if it is none."""
    if not isinstance(value, Mapping):
        raise EnvironmentFailed(f"{owner} answered {value!r:.80}")
    if invalid := value.get("invalid"):
        return EpisodeAnswer((), invalid=str(invalid))
    given = value.get("parts") or ()
    parts = tuple(_read_part(part, owner) for part in given[:MAX_PARTS])
    if len(given) > MAX_PARTS:
        parts += (Text(f"(and {len(given) - MAX_PARTS} more parts)"),)
    ended = bool(value.get("terminated")), bool(value.get("truncated"))
    return EpisodeAnswer(parts, read_reward(value.get("reward"), owner), *ended)


def read_reward(value: Any, owner: str) -> float | None:
    """A reward, if there is one. Raises EnvironmentFailed if it is not a finite number."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not isfinite(value):
        raise EnvironmentFailed(f"{owner} gave the reward {value!r:.40}, which is not a number")
    return float(value)


def cut_text(text: str) -> str:
    """The text, or its beginning with the number of characters that are left out."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n(and {len(text) - MAX_TEXT} more characters)"


def _read_part(part: Any, owner: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return Text(cut_text(str(part.get("text", ""))))
    if kind == "image":
        try:
            return Image(b64decode(part["data"], validate=True), str(part.get("mime") or "image/png"))
        except (KeyError, TypeError, binascii.Error) as error:
            raise EnvironmentFailed(f"{owner} sent an image that is not base64 ({error})") from error
    raise EnvironmentFailed(f"{owner} sent a part that cannot be shown: {part!r:.80}")
