"""Every key is looked up: it becomes a setting, or is told to say nothing here, or is refused in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.config.env import path
from gateway.config.mistakes import nearest
from gateway.errors import ConfigError, ConfigErrors
from trainer.train.settings import TrainSettings
from trainer.verl.resolve import resolved
from trainer.verl.row import Asked, How, No, Row, Table
from trainer.verl.shell import UNKNOWN
from trainer.verl.table import VERL
from trainer.verl.written import Keys

UNREAD = "only a shell would know what "
"""How a mistake begins that leaves a key unread; of such a key nothing more is said."""


@dataclass(frozen=True, slots=True)
class Became:
    """One key and what became of it."""

    key: str
    place: str
    row: Row
    value: Any
    """Here, where the row sets something."""


@dataclass(frozen=True, slots=True)
class Translation:
    settings: Mapping[str, Any]
    """As `TrainSettings` takes them."""
    became: tuple[Became, ...]
    """Of each key that was written."""
    sources: Mapping[str, str]
    """Of each setting, the key that it comes from."""
    table: Table


def translate(keys: Keys, table: Table = VERL) -> Translation:
    """Raises ConfigErrors with every key that is unknown, and every one that would change the result."""
    mistakes: list[ConfigError] = []
    asked = _asked(keys, table, mistakes)
    settings: dict[str, Any] = {}
    made: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for row in table.rows:
        try:
            value = row.make(asked[row.name], asked) if row.make is not None else asked[row.name]
        except No as no:
            found, told = _no(row, asked, no, table), {(one.field, one.problem) for one in mistakes}
            unread = {one.field for one in mistakes if one.problem.startswith(UNREAD)}
            if not (found.field in unread or (found.field, found.problem) in told):
                mistakes.append(found)
            continue
        if row.ours and value is not None:
            made[row.name] = value
            sources[row.ours] = row.name
            _set(settings, row.ours, value)
    for ours, (value, _) in table.beside.items():
        _set(settings, ours, value)
    if not mistakes:
        mistakes += _invalid(settings, sources, asked, table)
    if mistakes:
        raise ConfigErrors(mistakes)
    rows = ((key, given, table.row_of(key)) for key, given in keys.items())
    became = (Became(key, given.place, row, made.get(row.name)) for key, given, row in rows if row is not None)
    return Translation(settings, tuple(became), sources, table)


def _asked(keys: Keys, table: Table, mistakes: list[ConfigError]) -> Asked:
    """All keys under the names that count; a key that is written twice, in two spellings, must say one thing."""
    found: Keys = {}
    for key, given in resolved(keys, table.defaults).items():
        row = table.row_of(key)
        if row is None:
            mistakes.append(_unknown(key, given.place, table))
            continue
        if isinstance(given.value, str) and UNKNOWN in given.value and row.how is not How.IDLE:
            problem = f"{UNREAD}{given.value.replace(UNKNOWN, '$(...)')!r} is"
            mistakes.append(ConfigError(problem, file=given.place, field=key, remedy="write the value"))
            continue
        name = row.named(key)
        if name in found and given.value is None:
            continue  # Of two spellings, one was left as it was.
        if name in found and found[name].value not in (None, given.value):
            problem = f"is also written at {found[name].place}, and says something else there"
            mistakes.append(ConfigError(problem, file=given.place, field=key, remedy="keep one of them"))
        found[name] = given
    return Asked(found, table.defaults)


def _unknown(key: str, place: str, table: Table) -> ConfigError:
    near = nearest(key, [name for name in table.names if not name.endswith(".*")])
    remedy = f"did you mean `{near}`?" if near else "take it out, if it changes no result, or see `translate --table`"
    return ConfigError("is no key that is known here", file=place, field=key, remedy=remedy)


def _no(row: Row, asked: Asked, no: No, table: Table) -> ConfigError:
    """At the key that was written, be it the row's own or one that it looks at."""
    key = no.key or row.name
    given = asked.keys.get(key)
    place = given.place if given is not None else next(_near(row, asked), table.left_out)
    return ConfigError(no.problem, file=place, field=key, remedy=no.remedy)


def _near(row: Row, asked: Asked) -> Iterator[str]:
    stem = row.name.removesuffix("*")
    return (given.place for key, given in asked.keys.items() if key.startswith(stem))


def _set(settings: dict[str, Any], ours: str, value: Any) -> None:
    *above, last = ours.split(".")
    for name in above:
        settings = settings.setdefault(name, {})
    if isinstance(value, dict) and isinstance(settings.get(last), dict):
        settings[last] |= value
    else:
        settings[last] = value


def _invalid(
    settings: Mapping[str, Any], sources: Mapping[str, str], asked: Asked, table: Table
) -> Iterator[ConfigError]:
    """What our own settings refuse, told of the key that it came from."""
    try:
        TrainSettings.model_validate(settings)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            ours = path(detail["loc"])
            source = next((theirs for name, theirs in sources.items() if f"{ours}.".startswith(f"{name}.")), "")
            given = asked.keys.get(source)
            said = detail["msg"].removeprefix("Value error, ")
            place = given.place if given is not None else table.left_out
            yield ConfigError(f"{said} (here: {ours})", file=place, field=source, remedy="correct the value")
