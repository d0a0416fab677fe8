"""Generates the JSON Schema that editors use for run files: `python -m trainer.train.run_schema --write`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from gateway.config.editor_schema import file_schema
from trainer.train.settings import TrainSettings

RUN_SCHEMA = Path(__file__).with_name("run.schema.json")


def describe_field(model: type[BaseModel], name: str) -> str:
    """What a key of a run file means; a section without a text of its own has that of its settings."""
    field = model.model_fields[name]
    inner = next((kind for kind in _kinds(field.annotation) if issubclass(kind, BaseModel)), None)
    text = field.description or (inspect.getdoc(inner) if inner else "") or ""
    return " ".join(text.split())


def _kinds(annotation: Any) -> Iterator[type]:
    """The classes in a type, such as those of a list's items."""
    if inspect.isclass(annotation) and not get_args(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def run_schema() -> dict[str, Any]:
    """The JSON Schema of run files; every key has a description."""
    schema = file_schema("mtrl run file", TrainSettings)
    definitions: Mapping[str, Any] = schema["$defs"]
    for part in (schema, *definitions.values()):
        for value in part.get("properties", {}).values():
            for reference in _references(value) if not value.get("description") else ():
                value["description"] = definitions[reference].get("description", "")
    schema["properties"] = {**schema["properties"], "objects": False}  # Only `mtrl_plugins.trl.api` sets it.
    return schema


def _references(value: Any) -> Iterator[str]:
    """The definitions that a part of a schema leads to, also as one of several forms or as items."""
    if isinstance(value, Mapping):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for key in ("anyOf", "oneOf", "items", "additionalProperties"):
            yield from _references(value.get(key))
        yield from _references([*value.get("patternProperties", {}).values()])
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def schema_text() -> str:
    """The text of the shipped schema file."""
    return json.dumps(run_schema(), indent=2) + "\n"


def main() -> None:
    """Prints the schema, or writes it with `--write`."""
    if "--write" in sys.argv:
        RUN_SCHEMA.write_text(schema_text(), encoding="utf-8")
    else:
        sys.stdout.write(schema_text())


if __name__ == "__main__":
    main()
