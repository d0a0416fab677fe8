"""A run that is looked at: its numbers, its settings, its rollouts and its alarms, as far as they are written."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from trainer.config import flat
from trainer.page.charts import charts
from trainer.page.index import Index
from trainer.page.query import MOST, Query
from trainer.page.search import Search
from trainer.page.summary import SURROUNDS
from trainer.page.told import told
from trainer.page.words import Words
from trainer.run.about import ABOUT, about, run_of
from trainer.run.blobs import Folder as Blobs
from trainer.run.credits import Credits
from trainer.run.file import NAME as ROLLOUTS
from trainer.run.file import RunError
from trainer.run.history import NAME as METRICS
from trainer.run.line import load
from trainer.run.rollout import Rollout
from trainer.train.alarms import Alarms
from trainer.view.credited import Credited
from trainer.view.mark import Mark

SEARCH_S = 0.4
"""Of the text of rollouts, at one time: whoever asks again gets further."""
CHOICES = 200
"""To choose among, the commonest; a column may hold something else in every row."""
SIBLINGS = 64
"""Of a group, at the most."""


class Missing(LookupError):
    """There is no such rollout, group or picture."""


@dataclass
class Run:
    name: str
    """Told apart from the others that are shown."""
    folder: Path
    _lock: Lock = field(default_factory=Lock)
    _index: Index | None = None
    _search: Search | None = None
    _mark: Mark = field(default_factory=Mark)
    _born: bool = False

    @property
    def index(self) -> Index:
        """Opened when it is first needed; anew once the run has begun, and says what success is."""
        with self._lock:
            born = (self.folder / ROLLOUTS).exists()
            if self._index is None or born != self._born or (self._mark == Mark() and self.mark != Mark()):
                self._born, self._mark = born, self.mark
                self._index = Index(self.folder / ROLLOUTS, self._mark)
                self._search = Search(self._index)
            return self._index

    def grow(self) -> bool:
        """Lists some more of what is written; False where there is no more."""
        return self.index.grow()

    def stop(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.close()

    @cached_property
    def credits(self) -> Credits:
        return Credits(self.folder)

    @property
    def mark(self) -> Mark:
        return Mark.of(self.folder)

    @cached_property
    def words(self) -> Words:
        """Raises ValueError where its tokenizer is gone."""
        made = about(self.folder)
        return Words.of(Path(made.get("model") or made.get("settings", {}).get("model") or ""))

    def told(self) -> dict[str, Any]:
        made = about(self.folder)
        settings = made.get("settings", {})
        return {
            "name": self.name,
            "folder": str(self.folder),
            "steps": settings.get("steps") if run_of(self.folder) == self.folder else None,
            "engine": made.get("engine"),
            "model": made.get("model"),
            "versions": made.get("versions", {}),
            "machine": made.get("machine", {}),
            "settings": flat(settings),
            "telling": self.mark.telling,
            "charts": charts(),
            "changed": self._changed(),
        }

    def metrics(self, start: int) -> dict[str, Any]:
        """The lines from this byte on, and where the next will begin; from the first, where the file was cut."""
        file = self.folder / METRICS
        try:
            with file.open("rb") as opened:
                again = start > opened.seek(0, 2) or not _begins(opened, start)
                opened.seek(start := 0 if again else start)
                lines = list(_whole(opened))
        except OSError:
            return {"lines": [], "at": 0, "again": start > 0}
        found = [told for line in lines if (told := _numbers(line)) is not None]
        return {"lines": found, "at": start + sum(map(len, lines)), "again": again, "changed": self._changed()}

    def alarms(self) -> list[dict[str, Any]]:
        """What was alarming, step by step: as it was told while it trained."""
        alarms, lost = Alarms(), self._lost()
        found = []
        for metrics in self.metrics(0)["lines"]:
            step = int(metrics["step"])
            known = {name: value for name, value in metrics.items() if value is not None}
            for said in alarms.look(known, lost.get(step, Counter())):
                seen, *rest = said.split("\n  ")
                more = dict(line.partition(": ")[::2] for line in rest)
                found.append({"step": step, "seen": seen, **more})
        return found

    def rollouts(self, query: Query) -> dict[str, Any]:
        index = self.index
        looked = self._search.look(query.words, SEARCH_S) if self._search and query.words else 0
        whole = index.ask(query.total, query.given)[0]
        rows = [_opened(one) for one in self.index.ask(query.rows, query.given)]
        return {
            **whole,
            "rows": rows,
            "offset": query.offset,
            "known": self.index.known,
            "looked": looked,
        } | self._read()

    def choices(self) -> dict[str, Any]:
        """What a table can be filtered by."""
        counts: dict[str, Counter[str]] = {"tool": Counter(), "outcome": Counter()}
        for name, column in (("tool", "tools"), ("outcome", "outcomes")):
            for one in self.index.ask(f"SELECT {column} AS listed, COUNT(*) AS many FROM rollouts GROUP BY {column}"):  # noqa: S608
                for key in json.loads(one["listed"] or "{}"):
                    counts[name][key] += one["many"]
        found: dict[str, Any] = {name: dict(counted.most_common()) for name, counted in counts.items()}
        for column in ("stop", "blame", "kind"):
            query = f"SELECT {column} AS name, COUNT(*) AS many FROM rollouts WHERE {column} != '' GROUP BY 1"  # noqa: S608
            listed = self.index.ask(f"{query} ORDER BY 2 DESC, 1 LIMIT {CHOICES}")
            found[column] = {one["name"]: one["many"] for one in listed}
        return found | self.index.ask("SELECT MIN(step) AS first, MAX(step) AS last, COUNT(*) AS rows FROM rollouts")[0]

    def rollout(self, place: int) -> dict[str, Any]:
        row = self._row(place)
        one = self._rollout(row)
        words, silent = None, ""
        try:
            with self._lock:
                words = self.words
        except ValueError as error:
            silent = str(error)
        credited = Credited.of(one, self.credits)
        siblings = [self._opened_sibling(other) for other in self._siblings(row["grp"])]
        return {"row": _opened(row), "siblings": siblings, "silent": silent} | told(one, words, credited)

    def group(self, name: str) -> dict[str, Any]:
        """Siblings side by side."""
        places = [one["place"] for one in self._siblings(name)]
        if not places:
            raise Missing(f"there is no group {name[:80]!r}")
        return {"group": name, "rollouts": [self.rollout(place) for place in places]}

    def blob(self, digest: str) -> bytes:
        try:
            return Blobs(self.folder / "blobs").get(digest)
        except ValueError as error:
            raise Missing(str(error)) from error

    def _row(self, place: int) -> dict[str, Any]:
        found = self.index.ask("SELECT * FROM rollouts WHERE place = ?", [place]) if place <= MOST else []
        if not found:
            raise Missing(f"there is no rollout {place}, or it is not listed yet")
        return found[0]

    def _rollout(self, row: Mapping[str, Any]) -> Rollout:
        file = self.folder / ROLLOUTS
        try:
            with file.open("rb") as text:
                text.seek(row["start"])
                return load(text.read(row["end"] - row["start"]), Blobs(self.folder / "blobs"))
        except (OSError, ValueError) as error:
            remedy = "read it with the version of mtrl that wrote it, or take the line out"
            raise RunError(f"{file}: line {row['place'] + 1}: {error}\n  remedy: {remedy}") from error

    def _siblings(self, group: str) -> list[dict[str, Any]]:
        query = "SELECT place, idx, reward, success, stop FROM rollouts WHERE grp = ? AND grp != '' ORDER BY idx, place"
        return self.index.ask(f"{query} LIMIT {SIBLINGS}", [group])

    def _opened_sibling(self, one: Mapping[str, Any]) -> dict[str, Any]:
        return {"place": one["place"], "index": one["idx"]} | {
            name: one[name] for name in ("reward", "success", "stop")
        }

    def _lost(self) -> Mapping[int, Counter[str]]:
        lost: defaultdict[int, Counter[str]] = defaultdict(Counter)
        marks = ", ".join("?" * len(SURROUNDS))
        query = f"SELECT step, stop, reason, COUNT(*) AS many FROM rollouts WHERE stop IN ({marks}) GROUP BY 1, 2, 3"  # noqa: S608
        for one in self.index.ask(query, list(SURROUNDS)):
            lost[one["step"] or 0][f"{one['stop']}: {one['reason']}"] += one["many"]
        return lost

    def _read(self) -> dict[str, Any]:
        """How much of the file is listed."""
        end = self.index.ask('SELECT MAX("end") AS "end" FROM rollouts')[0]["end"] or 0
        file = self.folder / ROLLOUTS
        size = file.stat().st_size if file.exists() else 0
        return {"listed": end / size if size else 1.0}

    def _changed(self) -> float | None:
        """When something was last written, in seconds of the world's clock."""
        files = [self.folder / name for name in (METRICS, ROLLOUTS, ABOUT)]
        return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def named(folders: Sequence[Path]) -> list[Run]:
    """Runs by the shortest names that tell them apart."""
    whole = [folder.resolve() for folder in folders]
    short = Counter(folder.name for folder in whole)
    return [
        Run(path.name if short[path.name] == 1 else f"{path.parent.name}~{path.name}~{place}", path)
        for place, path in enumerate(whole)
    ]


def _whole(opened: Any) -> Iterator[bytes]:
    for line in opened:
        if not line.endswith(b"\n"):
            return
        yield line


def _begins(opened: Any, start: int) -> bool:
    """Whether a line begins there."""
    if not start:
        return True
    opened.seek(start - 1)
    return bool(opened.read(1) == b"\n")


def _numbers(line: bytes) -> dict[str, Any] | None:
    """None for what is damaged: all else that was measured is still worth seeing."""
    try:
        found = json.loads(line)
        return {"step": int(found["step"])} | {name: _finite(value) for name, value in found.items() if name != "step"}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and isfinite(value) else None


def _opened(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept as JSON is told as what it is."""
    hidden = ("start", "end")
    told = {name: value for name, value in row.items() if name not in hidden}
    return told | {name: json.loads(told[name] or "{}") for name in ("tools", "outcomes", "rewards")}
