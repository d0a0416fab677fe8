"""A mistake is told with its line: the file is looked at once more, by whoever made one and by nobody else."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import yaml

KINDS = (".yaml", ".yml", ".json")
MOST_BYTES = 1024 * 1024
"""No file of settings is larger."""
OWNED = re.compile(r"(?P<file>.+\.(?:yaml|yml|json)) (?P<field>\S.*)")
"""An entry as messages name it: its file, and where it stands in it."""
STEP = re.compile(r"\[(?P<place>\d+)\]|\[(?P<quote>['\"])(?P<quoted>.*?)(?P=quote)\]|\.?(?P<name>[\w$@/-]+)")


def line_of(file: object, field: str) -> tuple[str, str, int] | None:
    """The file, the field in it, and the line where the field stands, or else the nearest above it that does."""
    owned = OWNED.fullmatch(str(file))
    name, whole = (owned["file"], f"{owned['field']}.{field}".rstrip(".")) if owned else (str(file), field)
    steps = _steps(whole)
    if not name.endswith(KINDS) or not steps:
        return None
    try:
        with open(name, "rb") as stream:
            text = stream.read(MOST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError):
        return None
    line = _found(_node(text), steps)
    return None if line is None else (name, whole, line)


def _steps(field: str) -> list[str | int]:
    found = STEP.finditer(field)
    return [int(one["place"]) if one["place"] else one["quoted"] or one["name"] or "" for one in found]


@lru_cache(maxsize=4)
def _node(text: str) -> Any:
    """The text as nodes that know their lines; JSON is YAML, but for its tabs."""
    try:
        return yaml.compose(text.replace("\t", " "), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def _found(node: Any, steps: list[str | int]) -> int | None:
    line = None
    for step in steps:
        kind = getattr(node, "id", None)
        if kind == "sequence" and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        elif kind == "mapping" and step == 0:
            continue  # A single one needs no list around it.
        elif kind == "mapping":
            pair = next((pair for pair in node.value if pair[0].value == step), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        else:
            break
    return line
