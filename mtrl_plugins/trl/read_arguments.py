"""Reads the `args` of a trainer: a mapping, a `trl.GRPOConfig`, or another object with its names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

from gateway.errors import ConfigError
from mtrl_plugins.scripts.key_table import Keys, PlacedValue, Rule
from mtrl_plugins.scripts.translate import Translation, translate
from mtrl_plugins.trl.conversions import ROWS, TRL_TABLE

PLACE = "args"
"""Where errors say that an argument is."""


def translate_arguments(args: Any, peft_config: Any = None, rows: int | None = None) -> Translation:
    """The settings for the trainer's arguments; `rows` is the length of the data, if it has one.

    Raises ConfigErrors with all arguments that are unknown or not supported.
    """
    keys: Keys = {name: PlacedValue(value, PLACE) for name, value in read_arguments(args).items()}
    if rows is not None:
        keys[ROWS] = PlacedValue(rows, PLACE)
    if peft_config is not None:
        keys["peft_config"] = PlacedValue(peft_config, "GRPO")
    table = dataclasses.replace(TRL_TABLE, rules=(*TRL_TABLE.rules, Rule([ROWS])))
    return translate(keys, table)


def read_arguments(args: Any) -> dict[str, Any]:
    """The arguments by name; of a dataclass, those that differ from its defaults."""
    if args is None:
        return {}
    if isinstance(args, Mapping):
        values = dict(args)
    elif dataclasses.is_dataclass(args) and not isinstance(args, type):
        values = {name: getattr(args, name) for name in _changed_fields(args)}
    elif isinstance(args, SimpleNamespace):
        values = dict(vars(args))
    else:
        remedy = "pass a GRPOConfig, or a dict with its names"
        raise ConfigError(f"is a {type(args).__name__}", field=PLACE, remedy=remedy)
    return {str(name): _to_plain(value) for name, value in values.items()}


def _changed_fields(args: Any) -> Iterable[str]:
    """The fields of a dataclass that differ from those of a new instance, which fills in defaults in the same way."""
    fields = [field for field in dataclasses.fields(args) if field.init]
    required = {
        field.name: getattr(args, field.name)
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    try:
        default = type(args)(**required)
    except Exception:  # boundary: a class of the user's own may refuse what it is given
        default = None
    for field in fields:
        before = _declared_default(field) if default is None else getattr(default, field.name)
        if field.name in required or not _equal(getattr(args, field.name), before):
            yield field.name


def _declared_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _equal(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except Exception:  # boundary: values of any kind, such as arrays, may not compare to a truth value
        return False


def _to_plain(value: Any) -> Any:
    """Enumerations, such as transformers' schedulers, as their values; tuples as lists."""
    if isinstance(value, Enum):
        return value.value
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value
