"""Rows of an environment's own data, as tasks read them."""

from __future__ import annotations

from typing import Any

from gateway.errors import ConfigError
from mtrl_plugins.environments.environment_messages import read_messages
from mtrl_plugins.environments.environment_stepper import ROW_COLUMN
from mtrl_plugins.environments.host_process import EnvironmentHost, get_host
from mtrl_plugins.environments.settings import RunnerSettings
from trainer.data.row_media import Row

PAGE = 256
"""Rows that are read at once."""
SPLITS = ("train", "eval")
NO_PROMPT = "(the environment begins)"


def read_rows(settings: RunnerSettings, name: str) -> list[Row] | None:
    """The rows that `name` means as `data`: `verifiers` or `verifiers:eval`; None if it means something else."""
    framework, _, split = name.partition(":")
    if framework != settings.framework:
        return None
    if (split or SPLITS[0]) not in SPLITS:
        remedy = f"write {framework} or {framework}:eval"
        raise ConfigError(f"has no split {split!r}", file=name, field="data", remedy=remedy)
    host, rows = get_host(settings), list[Row]()
    while len(rows) < settings.rows:
        wanted = min(PAGE, settings.rows - len(rows))
        page = host.rows(split or SPLITS[0], len(rows), wanted)
        rows += [_read_row(host, row, split or SPLITS[0], len(rows) + number) for number, row in enumerate(page)]
        if len(page) < wanted:
            break
    if not rows:
        problem, remedy = f"{host.name} has no rows", "let it load its data set, or name another one in `args`"
        raise ConfigError(problem, file=name, field="data", remedy=remedy)
    return rows


def _read_row(host: EnvironmentHost, row: Any, split: str, number: int) -> Row:
    """A row; its prompt is for showing, since the environment itself opens the chat."""
    prompt = row.get("prompt") or NO_PROMPT
    messages = read_messages(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
    shown = [{"role": message["role"], "content": _text(message["content"])} for message in messages]
    while len(shown) > 1 and shown[-1]["role"] == "assistant":
        shown.pop()
    place = {"split": split, "row": number, "digest": row["digest"]}
    columns = {key: row[key] for key in ("answer", "kind", "info") if row.get(key) not in (None, "")}
    return {"id": f"{split}-{number}", "prompt": shown, **columns, ROW_COLUMN: place}


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(str(part.get("text", "(an image)")) for part in parts) or "(empty)"
