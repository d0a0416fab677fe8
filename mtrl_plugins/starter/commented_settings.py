"""Writes settings as a run file with a comment above every line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from mtrl_plugins.scripts.translate import format_flow_yaml
from trainer.train.run_schema import describe_field
from trainer.train.settings import TrainSettings

WIDTH = 118
SCHEMA_LINE = "# yaml-language-server: $schema={schema}"
"""Editors complete and check a YAML file by the schema that this line names."""


def format_commented(settings: Mapping[str, Any], head: str, schema: str) -> str:
    """The settings as YAML, each explained."""
    lines = [SCHEMA_LINE.format(schema=schema), *_comment(head, "")]
    for name, value in settings.items():
        lines += ["", *_format_setting(TrainSettings, name, value, "")]
    return "\n".join(lines) + "\n"


def _format_setting(model: type[BaseModel], name: str, value: Any, above: str) -> Iterator[str]:
    """A setting with what it means; a section has its settings below it."""
    setting, indent = f"{above}{name}", "  " * above.count(".")
    yield from _comment(describe_field(model, name), indent)
    inner, is_table = _find_inner(model, name)
    if inner is None or not isinstance(value, Mapping) or not value:
        yield f"{indent}{name}: {format_flow_yaml(_to_plain(value))}"
        return
    yield f"{indent}{name}:"
    for key, item in value.items():
        if not is_table:
            yield from _format_setting(inner, key, item, f"{setting}.")
            continue
        yield f"{indent}  {key}:"
        for field, part in item.items():
            yield from _format_setting(inner, field, part, f"{setting}.{key}.")


def _find_inner(model: type[BaseModel], name: str) -> tuple[type[BaseModel] | None, bool]:
    """The settings in a section, and whether it is a table of them by names that the user chose."""
    annotation = model.model_fields[name].annotation
    is_table = get_origin(annotation) is dict
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None), is_table


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in wrap(text, WIDTH - len(indent), break_on_hyphens=False)]


def _to_plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
