"""The data of a run for the web UI: settings, metrics, alarms and rollouts, read from its files while it may train."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from gateway.line_file import MAX_LINE_BYTES, iterate_lines
from mtrl_plugins.web.charts import list_charts
from mtrl_plugins.web.notes import Notes
from mtrl_plugins.web.rollout_index import RolloutIndex
from mtrl_plugins.web.rollout_json import TokenTexts, rollout_to_json
from mtrl_plugins.web.rollout_row import BLAME_OF_STOP
from mtrl_plugins.web.search import MAX_INT, Query, Search
from mtrl_plugins.web.step_digest import digest_steps
from mtrl_plugins.web.success_criterion import SuccessCriterion
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import flatten_settings
from trainer.storage.rollout_file import ROLLOUTS_FILE as ROLLOUTS
from trainer.storage.rollout_file import RunError
from trainer.storage.rollout_line import BlobFolder as Blobs
from trainer.storage.rollout_line import load_rollout
from trainer.storage.run_files import METRICS_FILE as METRICS
from trainer.storage.run_files import RUN_INFO_FILE, find_run_folder, read_run_info
from trainer.storage.run_status import read_status
from trainer.storage.token_credit import CreditReader
from trainer.train.alarms import Alarms
from trainer.view.why import RolloutCredit

SEARCH_TIME_S = 0.4
"""The time that a request spends on a full-text search; the next request continues it."""
MAX_CHOICES = 200
"""The number of most frequent values of a column to filter by."""
MAX_SIBLINGS = 64
"""The number of rollouts shown of a group."""


class NotFound(LookupError):
    """There is no such rollout, group or blob."""


@dataclass
class ViewedRun:
    """A run that is shown."""

    name: str
    """Unique among the viewed runs."""
    folder: Path
    _lock: Lock = field(default_factory=Lock)
    _index: RolloutIndex | None = None
    _search: Search | None = None
    _criterion: SuccessCriterion = field(default_factory=SuccessCriterion)
    _has_rollouts: bool = False

    @property
    def index(self) -> RolloutIndex:
        """The index, opened on first use and reopened when the run has started and defines success."""
        with self._lock:
            has_rollouts = (self.folder / ROLLOUTS).exists()
            if (
                self._index is None
                or has_rollouts != self._has_rollouts
                or (self._criterion == SuccessCriterion() and self.criterion != SuccessCriterion())
            ):
                self._has_rollouts, self._criterion = has_rollouts, self.criterion
                self._index = RolloutIndex(self.folder / ROLLOUTS, self._criterion)
                self._search = Search(self._index)
            return self._index

    def update_index(self) -> bool:
        """Indexes some new rollouts; returns False if there are none."""
        return self.index.update()

    def close(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.close()

    @cached_property
    def credits(self) -> CreditReader:
        return CreditReader(self.folder)

    @property
    def criterion(self) -> SuccessCriterion:
        return SuccessCriterion.load(self.folder)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of tokens. Raises ValueError if the tokenizer is missing."""
        info = read_run_info(self.folder)
        return TokenTexts.load(Path(info.get("model") or info.get("settings", {}).get("model") or ""))

    def to_dict(self) -> dict[str, Any]:
        info = read_run_info(self.folder)
        settings = info.get("settings", {})
        return {
            "name": self.name,
            "folder": str(self.folder),
            "steps": settings.get("steps") if find_run_folder(self.folder) == self.folder else None,
            "engine": info.get("engine"),
            "model": info.get("model"),
            "versions": info.get("versions", {}),
            "machine": info.get("machine", {}),
            "settings": flatten_settings(settings),
            "telling": self.criterion.component,
            "charts": list_charts(),
            "changed": self._last_change(),
            **Notes.load(self.folder).model_dump(mode="json"),
        }

    def metrics(self, start: int) -> dict[str, Any]:
        """The metrics from a position in the file on, and the next position; from the start if the file was cut."""
        file = self.folder / METRICS
        try:
            with file.open("rb") as opened:
                restarted = start > opened.seek(0, 2) or not _is_line_start(opened, start)
                start = 0 if restarted else start
                lines = list(takewhile(lambda line: line.is_complete, iterate_lines(opened, start)))
        except OSError:
            return {"lines": [], "at": 0, "again": start > 0, "now": self._now()}
        parsed = [values for line in lines if (values := _parse_metrics(line.data)) is not None]
        end = lines[-1].end if lines else start
        return {"lines": parsed, "at": end, "again": restarted, "changed": self._last_change(), "now": self._now()}

    def _now(self) -> dict[str, Any] | None:
        """What the run is doing, and how old that news is; None if it does not train."""
        found = read_status(self.folder)
        return asdict(found[0]) | {"age_s": found[1]} if found else None

    def alarms(self) -> list[dict[str, Any]]:
        """The alarms of all steps, as they were printed during training."""
        alarms, lost = self._make_alarms(), self._count_failures()
        result = []
        for metrics in self.metrics(0)["lines"]:
            step = int(metrics["step"])
            values = {name: value for name, value in metrics.items() if value is not None}
            for message in alarms.check(values, lost.get(step, Counter())):
                problem, *rest = message.split("\n  ")
                more = dict(line.partition(": ")[::2] for line in rest)
                result.append({"step": step, "seen": problem, **more})
        return result

    def _make_alarms(self) -> Alarms:
        """Alarms that know what those of the training knew; not the vocabulary, if the model is gone."""
        group_size = read_run_info(self.folder).get("settings", {}).get("n")
        try:
            vocabulary = self.token_texts.vocabulary
        except ValueError:
            vocabulary = 0
        return Alarms(group_size if isinstance(group_size, int) else 0, vocabulary)

    def rollouts(self, query: Query) -> dict[str, Any]:
        index = self.index
        searched = self._search.advance(query.text, SEARCH_TIME_S) if self._search and query.text else 0
        totals = index.select(query.total_sql, query.values)[0]
        rows = [_row_to_json(row) for row in self.index.select(query.rows_sql, query.values)]
        return {
            **totals,
            "rows": rows,
            "offset": query.offset,
            "known": self.index.count,
            "looked": searched,
        } | self._indexed_share()

    def choices(self) -> dict[str, Any]:
        """Values to filter the table by, with their numbers of rollouts."""
        counts: dict[str, Counter[str]] = {"tool": Counter(), "outcome": Counter()}
        for name, column in (("tool", "tools"), ("outcome", "outcomes")):
            query = f"SELECT {column} AS listed, COUNT(*) AS many FROM rollouts GROUP BY {column}"  # noqa: S608
            for row in self.index.select(query):
                for key in json.loads(row["listed"] or "{}"):
                    counts[name][key] += row["many"]
        result: dict[str, Any] = {name: dict(counted.most_common()) for name, counted in counts.items()}
        for column in ("stop", "blame", "kind", "source"):
            query = f"SELECT {column} AS name, COUNT(*) AS many FROM rollouts WHERE {column} != '' GROUP BY 1"  # noqa: S608
            listed = self.index.select(f"{query} ORDER BY 2 DESC, 1 LIMIT {MAX_CHOICES}")
            result[column] = {row["name"]: row["many"] for row in listed}
        steps = self.index.select("SELECT MIN(step) AS first, MAX(step) AS last, COUNT(*) AS rows FROM rollouts")
        return result | steps[0]

    def steps(self, first: int = 0, last: int = MAX_INT) -> list[dict[str, Any]]:
        """Digests of a range of steps."""
        return digest_steps(self.index, first, last)

    def rollout(self, place: int) -> dict[str, Any]:
        row = self._find_row(place)
        rollout = self._load_rollout(row)
        token_texts, silent = None, ""
        try:
            with self._lock:
                token_texts = self.token_texts
        except ValueError as error:
            silent = str(error)
        credited = RolloutCredit.load(rollout, self.credits)
        siblings = [{"index": other.pop("idx"), **other} for other in self._siblings(row["grp"])]
        return {"row": _row_to_json(row), "siblings": siblings, "silent": silent} | rollout_to_json(
            rollout, token_texts, credited
        )

    def group(self, name: str) -> dict[str, Any]:
        """All rollouts of a group."""
        places = [row["place"] for row in self._siblings(name)]
        if not places:
            raise NotFound(f"there is no group {name[:80]!r}")
        return {"group": name, "rollouts": [self.rollout(place) for place in places]}

    def blob(self, digest: str) -> bytes:
        try:
            return Blobs(self.folder / "blobs").get(digest)
        except ValueError as error:
            raise NotFound(str(error)) from error

    def _find_row(self, place: int) -> dict[str, Any]:
        rows = self.index.select("SELECT * FROM rollouts WHERE place = ?", [place]) if place <= MAX_INT else []
        if not rows:
            raise NotFound(f"there is no rollout {place}, or it is not indexed yet")
        return rows[0]

    def _load_rollout(self, row: Mapping[str, Any]) -> Rollout:
        file = self.folder / ROLLOUTS
        try:
            if row["end"] - row["start"] > MAX_LINE_BYTES:
                raise ValueError(f"the line has more than {MAX_LINE_BYTES} bytes")
            with file.open("rb") as text:
                text.seek(row["start"])
                return load_rollout(text.read(row["end"] - row["start"]), Blobs(self.folder / "blobs"))
        except (OSError, ValueError) as error:
            remedy = "read it with the version of mtrl that wrote it, or remove the line"
            raise RunError(f"{file}: line {row['place'] + 1}: {error}\n  remedy: {remedy}") from error

    def _siblings(self, group: str) -> list[dict[str, Any]]:
        query = "SELECT place, idx, reward, success, stop FROM rollouts WHERE grp = ? AND grp != '' ORDER BY idx, place"
        return self.index.select(f"{query} LIMIT {MAX_SIBLINGS}", [group])

    def _count_failures(self) -> Mapping[int, Counter[str]]:
        lost: defaultdict[int, Counter[str]] = defaultdict(Counter)
        marks = ", ".join("?" * len(BLAME_OF_STOP))
        query = f"SELECT step, stop, reason, COUNT(*) AS many FROM rollouts WHERE stop IN ({marks}) GROUP BY 1, 2, 3"  # noqa: S608
        for row in self.index.select(query, list(BLAME_OF_STOP)):
            lost[row["step"] or 0][f"{row['stop']}: {row['reason']}"] += row["many"]
        return lost

    def _indexed_share(self) -> dict[str, Any]:
        """The indexed share of the file."""
        end = self.index.select('SELECT MAX("end") AS "end" FROM rollouts')[0]["end"] or 0
        file = self.folder / ROLLOUTS
        size = file.stat().st_size if file.exists() else 0
        return {"listed": end / size if size else 1.0}

    def _last_change(self) -> float | None:
        """The time of the last change of the run's files, in Unix seconds."""
        files = [self.folder / name for name in (METRICS, ROLLOUTS, RUN_INFO_FILE)]
        return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def name_runs(folders: Sequence[Path]) -> list[ViewedRun]:
    """The runs with the shortest unique names."""
    paths = [folder.resolve() for folder in folders]
    name_counts = Counter(folder.name for folder in paths)
    return [
        ViewedRun(path.name if name_counts[path.name] == 1 else f"{path.parent.name}~{path.name}~{place}", path)
        for place, path in enumerate(paths)
    ]


def _is_line_start(opened: Any, start: int) -> bool:
    """True if a line begins at this position."""
    if not start:
        return True
    opened.seek(start - 1)
    return bool(opened.read(1) == b"\n")


def _parse_metrics(line: bytes) -> dict[str, Any] | None:
    """The metrics of a line; None if it is damaged, so that the others are still shown."""
    try:
        values = json.loads(line)
        return {"step": int(values["step"])} | {
            name: float(value) if value is not None and isfinite(value) else None
            for name, value in values.items()
            if name != "step"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _row_to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the index for a response, with columns of JSON decoded."""
    hidden = ("start", "end")
    values = {name: value for name, value in row.items() if name not in hidden}
    return values | {name: json.loads(values[name] or "{}") for name in ("tools", "outcomes", "rewards")}
