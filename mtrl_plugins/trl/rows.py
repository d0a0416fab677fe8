"""Rows of a data set for TRL as tasks: the prompt is asked, and every column is kept for reward functions.

No other column has a meaning here, so that a data set with `answer`, `tools` or `id` is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError, ConfigErrors
from trainer.data.row_media import RowMedia, row_id, to_plain
from trainer.data.tasks import LazyTasks
from trainer.ledger import Message
from trainer.rollout.settings import ColumnSettings
from trainer.rollout.task import Task

PROMPT, IMAGE, IMAGES = "prompt", "image", "images"
ENVIRONMENT = "environment"
"""The column that chooses an environment, if there are several."""
EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a row that has none, to which an environment's observation is added."""
MAX_ERRORS = 20
DATASET_HINT = "pass a data set, such as `load_dataset(..., split='train')`, or a list of rows"


def open_dataset(data: Any, name: str, most: int | None = None) -> Sequence[Mapping[str, Any]]:
    """The rows of a data set, a list, or anything that gives rows; of a stream the first `most`."""
    if isinstance(data, Mapping | str | bytes):
        kind = "several data sets or columns" if isinstance(data, Mapping) else "a text"
        raise ConfigError(f"is {kind}", field=name, remedy=DATASET_HINT)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return data  # type: ignore[no-any-return]
    if not isinstance(data, Iterable):
        raise ConfigError(f"is a {type(data).__name__}", field=name, remedy=DATASET_HINT)
    if most is None and not hasattr(data, "__len__"):
        raise ConfigError("has no length", field=name, remedy="set max_steps, or pass a list of its rows")
    return list(islice(data, most))


class DatasetTasks(LazyTasks):
    """The rows of a data set as tasks; all are checked at the start."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        name: str,
        tools: Mapping[str, tuple[str, ...]] | None = None,
        *,
        needs_prompt: bool = True,
    ) -> None:
        """`tools` are those of each environment, if the rows choose one."""
        self.rows, self.name, self._tools, self._needs_prompt = rows, name, tools, needs_prompt
        self._media = RowMedia(ColumnSettings(), Path())
        self._ids: list[str] = []
        self.columns: dict[str, None] = {}
        """The names of all columns, in order."""
        self.prompt_types: set[type] = set()
        """`str` if a prompt is a text, `list` if one is a chat."""
        self.longest_prompt = 0
        """The characters of the longest prompt."""
        self._check_all()

    def __len__(self) -> int:
        return len(self.rows)

    def _check_all(self) -> None:
        if not len(self):
            raise ConfigError("has no rows", field=self.name, remedy="pass a row for each task")
        errors: list[ConfigError] = []
        seen: dict[str, int] = {}
        for number in range(len(self)):
            try:
                task = self._read(number)
            except ConfigError as error:
                errors.append(error)
                if len(errors) == MAX_ERRORS:
                    break
                continue
            seen[task.id] = count = seen.get(task.id, 0) + 1
            self._ids.append(task.id if count == 1 else f"{task.id}-{count}")
            self._describe(task)
        if errors:
            raise ConfigErrors(errors)

    def _describe(self, task: Task) -> None:
        """Notes what all rows together have, so that they are read only once for it."""
        self.columns |= dict.fromkeys(task.columns)
        self.prompt_types.add(str if isinstance(task.columns.get(PROMPT), str) else list)
        length = sum(len(str(message.get("content"))) for message in task.messages)
        self.longest_prompt = max(self.longest_prompt, length)

    def _read(self, number: int) -> Task:
        row, location = self.rows[number], f"{self.name}[{number}]"
        if not isinstance(row, Mapping):
            raise ConfigError(f"is a {type(row).__name__}, not a row with columns", file=location, remedy=DATASET_HINT)
        messages = self._read_prompt(row, location)
        try:
            id = self._ids[number] if number < len(self._ids) else row_id({PROMPT: to_plain(list(messages))})
        except UnicodeError:
            problem, remedy = "holds half of a surrogate pair", "remove the truncated character"
            raise ConfigError(problem, file=location, field=PROMPT, remedy=remedy) from None
        task = Task(id, messages, columns=dict(row), location=location)
        session = replace(task.session_task, id=id, tools=self._offered_tools(row, location))
        return replace(task, session_task=session)

    def _read_prompt(self, row: Mapping[str, Any], location: str) -> tuple[Message, ...]:
        value = row.get(PROMPT)
        if value is None and not self._needs_prompt:
            value = EMPTY_PROMPT
        if isinstance(value, str) and value:
            return ({"role": "user", "content": value},)
        plain = to_plain(value)
        if not (isinstance(plain, list) and plain and all(isinstance(message, dict) for message in plain)):
            problem = "is missing" if value is None else "is neither a text nor a list of messages"
            raise ConfigError(problem, file=location, field=PROMPT, remedy='write "..." or [{"role": ...}]')
        chat = [{key: item for key, item in message.items() if item is not None} for message in plain]
        images = row.get(IMAGES) if row.get(IMAGES) is not None else row.get(IMAGE)
        errors: list[ConfigError] = []
        filled = self._media.insert_media(
            chat,
            {IMAGES: to_plain(images)},
            lambda field, problem, remedy: errors.append(
                ConfigError(problem, file=location, field=field, remedy=remedy)
            ),
        )
        if errors:
            raise ConfigErrors(errors)
        return tuple(filled)

    def _offered_tools(self, row: Mapping[str, Any], location: str) -> tuple[str, ...] | None:
        if self._tools is None:
            return None
        name: Any = row.get(ENVIRONMENT)
        if name not in self._tools:
            problem = f"{name!r} is no environment" if name is not None else "is missing"
            raise ConfigError(
                problem, file=location, field=ENVIRONMENT, remedy=f"write one of {', '.join(map(str, self._tools))}"
            )
        return self._tools[name]
