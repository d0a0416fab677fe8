"""An entry of a file becomes one interaction under one name; two under one name is a mistake, and both are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from gateway.config.entries import interaction_name
from gateway.config.models import MediaLimits
from gateway.errors import ConfigError, ConfigErrors, told
from gateway.feedback.base import BaseInteraction

TIMEOUT_S = 60.0
"""Deadline of one turn, where an entry names none."""

METHODS = ("start_interaction", "generate_response", "finalize_interaction")


@dataclass(frozen=True, slots=True)
class Declared:
    """One interaction as a file declares it, its class already found."""

    kind: Callable[[dict[str, Any]], BaseInteraction]
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    """None makes it of the class."""
    owner: str = ""
    """Where it is declared (`tool_configs/maths.yaml: interaction[0]`), for messages."""
    timeout_s: float = TIMEOUT_S
    media: MediaLimits = field(default_factory=MediaLimits)

    @property
    def offered_name(self) -> str:
        return self.name or interaction_name(getattr(self.kind, "__name__", ""))


def build(entries: Iterable[Declared]) -> dict[str, BaseInteraction]:
    """The interactions by name; every mistake is reported at once."""
    built: dict[str, BaseInteraction] = {}
    owners: dict[str, str] = {}
    mistakes: list[ConfigError] = []
    for entry in entries:
        name = entry.offered_name
        try:
            if name in built:
                raise _taken(name, owners[name], entry.owner)
            built[name] = _made(entry)
            owners[name] = entry.owner
        except ConfigError as error:
            mistakes.append(error)
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else ConfigErrors(mistakes)
    return built


def _made(entry: Declared) -> BaseInteraction:
    name = entry.offered_name
    absent = [method for method in METHODS if not callable(getattr(entry.kind, method, None))]
    if absent:
        problem = f"interaction {name!r}: its class lacks {', '.join(absent)}"
        remedy = "derive it from gateway.feedback.base.BaseInteraction"
        raise ConfigError(problem, file=entry.owner, field="class_name", remedy=remedy)
    try:
        return entry.kind({**entry.config, "name": name})
    except ConfigError as error:
        # What an interaction is built of may be wrong in turn.
        problem = f"interaction {name!r}: {error.problem}"
        raise ConfigError(problem, file=entry.owner, field=f"config.{error.field}", remedy=error.remedy) from error
    except ValidationError as error:
        # Without the input: it may be a key.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        problem = f"interaction {name!r}: {first['msg']}"
        raise ConfigError(problem, file=entry.owner, field=f"config.{place}") from None
    except Exception as error:  # boundary: an operator's class may raise anything over its configuration
        problem = f"interaction {name!r} cannot be built: {told(error)}"
        raise ConfigError(problem, file=entry.owner, field="config") from error


def _taken(name: str, one: str, other: str) -> ConfigError:
    return ConfigError(
        f"two interactions are named {name!r}: one of {one or 'no owner'}, one of {other or 'no owner'}",
        field="name",
        remedy="give one of them another `name`",
    )
