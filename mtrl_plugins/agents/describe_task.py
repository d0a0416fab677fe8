"""A task as an agent may know it: the question and the row, without the right answer."""

from __future__ import annotations

from typing import Any

from gateway.feedback.base import plain_text
from gateway.wire import to_plain
from trainer.rollout.task import Task

TRUTH_COLUMNS = frozenset({"reward_model", "ground_truth", "answer", "solution", "truth"})
"""Columns that hold the right answer in the data sets of several frameworks."""


def prompt_text(task: Task) -> str:
    """The last question as text."""
    asked = (message for message in reversed(task.messages) if message["role"] == "user")
    return plain_text(next(asked, {}).get("content"))


def describe_task(task: Task) -> dict[str, Any]:
    """The task in JSON types."""
    columns = {name: value for name, value in task.columns.items() if name not in TRUTH_COLUMNS}
    messages = [{**message, "content": plain_text(message.get("content"))} for message in task.messages]
    return {"id": task.id, "prompt": prompt_text(task), "messages": messages, "columns": to_plain(columns)}
