"""A hash of each source of a run's training rows, by which a resumed run tells that its data has changed.

run.json keeps the hashes by the first step that trained on these rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from trainer.data.examples import example_names
from trainer.data.tasks import iterate_texts
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from trainer.train.job import Job

DIGEST_BYTES = 16
Fingerprint = Mapping[str, str]
"""The hash of each source, by its name."""


def fingerprint_tasks(job: Job) -> Fingerprint:
    """The hash of each source of rows; what is generated, or given as Python objects, has none."""
    settings = job.settings
    if any(part.brings_rows for part in settings.parts):
        return {}
    stages = dict.fromkeys(stage.data for stage in settings.curriculum.stages)
    named = {name or settings.data: job.tasks.train[name] for name in stages}
    is_made = {*example_names(), *settings.objects}
    return {name: _hash_tasks(tasks) for name, tasks in named.items() if name not in is_made}


def _hash_tasks(tasks: Sequence[Task]) -> str:
    total = blake2b(digest_size=DIGEST_BYTES)
    for task in iterate_texts(tasks):
        content = json.dumps(_to_plain([task.id, task.messages, task.truth, task.columns]))
        total.update(content.encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest()


def _to_plain(value: Any) -> Any:
    """The value as JSON that is the same in every process."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return sorted(([str(key), _to_plain(item)] for key, item in value.items()), key=lambda pair: pair[0])
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
    text = repr(value)
    # A text with an address would differ in every process.
    return type(value).__qualname__ if " at 0x" in text or isinstance(value, Iterator | set | frozenset) else text
