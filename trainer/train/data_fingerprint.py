"""A fingerprint of a run's training tasks, by which a resumed run finds rows that have changed.

RUN/data.json    for each source: its name, the number of rows, a digest of each of the first `MAX_ROWS`, and one of the
                 rest; and the changes with which the run was resumed
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError, ConfigErrors
from trainer.data.tasks import iterate_texts
from trainer.rollout.task import Task
from trainer.train.settings import DEMOS

if TYPE_CHECKING:
    from trainer.train.job import Job

DATA_FILE = "data.json"
MAX_ROWS = 50_000
"""Rows with a digest of their own."""
SHOWN_ROWS = 5
DIGEST_BYTES = 8
Fingerprint = Sequence[Mapping[str, Any]]


def fingerprint_tasks(job: Job) -> Fingerprint:
    """The fingerprint of each source of rows; what is generated, or given as Python objects, has none."""
    return [_fingerprint_source(name, tasks) for name, tasks in _sources(job)]


def write_fingerprint(run: Path, fingerprint: Fingerprint, changes: Sequence[str] = ()) -> None:
    """Writes the fingerprint of a run that starts, or is resumed with these changes of its data."""
    earlier = _read(run).get("changes")
    time = datetime.now(UTC).isoformat(timespec="seconds")
    kept = [*(earlier if isinstance(earlier, list) else ()), *(f"{time} {change}" for change in changes)]
    write_atomically(run / DATA_FILE, (json.dumps({"sources": fingerprint, "changes": kept}) + "\n").encode())


def compare_data(run: Path, job: Job, fingerprint: Fingerprint, *, accept: bool = False) -> list[str]:
    """Notes about rows that were added since the run was started or last resumed; if accepted, of all changes.

    Raises ConfigErrors, which name the rows, if rows have changed or are gone and this is not accepted. Runs whose
    fingerprint is gone are not compared.
    """
    notes, errors = [], []
    # By their order: the copies of a run that was handed over have other names.
    for old, new, (name, tasks) in zip(_read_sources(run), fingerprint, _sources(job), strict=False):
        error = _compare_source(old, new, tasks)
        if error is None and new["rows"] > old["rows"]:
            more = new["rows"] - old["rows"]
            notes.append(f"{name}: {more} rows were added since the run was started; tasks come in another order now")
        elif error is not None and accept:
            notes.append(f"{name}: {error}; the run goes on with the rows as they are")
        elif error is not None:
            problem = f"the data has changed since the run was started: {error}"
            remedy = "restore the rows, or go on with the changed ones with --accept-data"
            errors.append(ConfigError(problem, file=name, field="data", remedy=remedy))
    if errors:
        raise ConfigErrors(errors)
    return notes


def _read(run: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((run / DATA_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_sources(run: Path) -> Fingerprint:
    try:
        return [
            {"rows": int(old["rows"]), "digests": [*map(str, old["digests"])], "rest": str(old["rest"])}
            for old in _read(run)["sources"]
        ]
    except (ValueError, KeyError, TypeError):
        return []


def _sources(job: Job) -> list[tuple[str, Sequence[Task]]]:
    """The sources of rows, in the order in which the curriculum names them."""
    settings = job.settings
    if settings.environment_settings is not None:
        return []
    stages = dict.fromkeys(stage.data for stage in settings.curriculum.stages)
    named = [(name or settings.data, job.tasks.train[name]) for name in stages]
    return [(name, tasks) for name, tasks in named if name not in DEMOS and name not in settings.objects]


def _fingerprint_source(name: str, tasks: Sequence[Task]) -> Mapping[str, Any]:
    rows = iterate_texts(tasks)
    first = [_digest([row]) for row in islice(rows, MAX_ROWS)]
    return {"name": name, "rows": len(tasks), "digests": first, "rest": _digest(rows)}


def _compare_source(old: Mapping[str, Any], new: Mapping[str, Any], tasks: Sequence[Task]) -> str | None:
    """What has changed or is gone; None if nothing is, or rows were only added."""
    pairs = enumerate(zip(old["digests"], new["digests"], strict=False))
    changed = [number for number, (before, now) in pairs if before != now]
    parts = []
    if new["rows"] < old["rows"]:
        parts.append(f"there were {old['rows']} rows, and are now {new['rows']}")
    if changed:
        locations = [task.location for task in islice(iterate_texts(tasks), changed[:SHOWN_ROWS][-1] + 1)]
        shown = ", ".join(locations[number] or f"row {number + 1}" for number in changed[:SHOWN_ROWS])
        more = f" and {len(changed) - SHOWN_ROWS} more" if len(changed) > SHOWN_ROWS else ""
        parts.append(f"{len(changed)} {'row differs' if len(changed) == 1 else 'rows differ'}: {shown}{more}")
    if new["rows"] == old["rows"] and new["rest"] != old["rest"]:
        parts.append(f"rows after row {MAX_ROWS} differ")
    return "; ".join(parts) or None


def _digest(tasks: Iterable[Task]) -> str:
    total = blake2b(digest_size=DIGEST_BYTES)
    for task in tasks:
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
