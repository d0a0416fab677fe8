"""Filters, sorts and searches the table of rollouts: URL parameters to SQL, and full-text search in rollouts.jsonl.

Users' text is only ever a value in SQL. A search scans the file in short slices; each request continues it.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from gateway.line_file import iterate_lines
from mtrl_plugins.web.rollout_index import RolloutIndex

DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")
"""The start of media within text, which is not searched."""
SKIPPED_FIELDS = frozenset({"role", "type", "id", "tool_call_id"})
"""Fields of a message that are not searched."""


def iterate_texts(fields: Mapping[str, Any]) -> Iterator[str]:
    """Texts of a rollout's messages and calls. Raises ValueError, KeyError, TypeError or AttributeError if damaged."""
    for ledger in (*fields.get("earlier", ()), fields):
        for entry in ledger.get("entries", ()):
            yield from _texts(entry.get("messages", ()))
            for _, name, arguments in entry.get("calls", ()):
                yield from (name, arguments)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and not DATA_URL.match(value):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from () if name in SKIPPED_FIELDS else _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


SORT_COLUMNS = frozenset(
    {
        "place",
        "step",
        "task",
        "kind",
        "grp",
        "reward",
        "turns",
        "tokens",
        "written",
        "calls",
        "seconds",
        "stop",
        "blame",
        "version",
    }
)
MAX_LIMIT = 500
"""The maximal number of rows in a response."""
SHOWN_COLUMNS = (
    "place, step, task, grp, idx, stop, reason, reward, success, turns, tokens, written, asked, cached, seconds, "
    "tools, calls, outcomes, blame, version, rewards, question, answer, kind, source"
)
SEARCHED_COLUMNS = ("task", "kind", "source", "question", "answer", "reason")
MAX_INT = 2**63 - 1
"""The largest integer in SQLite."""
SUCCESS_TESTS = {"yes": "success = 1", "no": "success = 0", "none": "success IS NULL"}


class InvalidQuery(ValueError):
    """An invalid parameter; the message says which values are valid."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query for the table of rollouts."""

    where: str
    values: tuple[Any, ...]
    order: str
    offset: int
    limit: int
    text: str
    """Lower-case text to find in the rollouts' texts as well."""

    @property
    def rows_sql(self) -> str:
        window = f"LIMIT {self.limit} OFFSET {self.offset}"
        return f"SELECT {SHOWN_COLUMNS} FROM rollouts{self.where} ORDER BY {self.order} {window}"  # noqa: S608

    @property
    def total_sql(self) -> str:
        return f"SELECT COUNT(*) AS total, AVG(reward) AS reward, AVG(success) AS success FROM rollouts{self.where}"  # noqa: S608


def parse_query(params: Mapping[str, str]) -> Query:
    """The query for the parameters of a URL; empty ones are ignored."""
    params = {name: value for name, value in params.items() if value != ""}
    text = params.get("q", "").strip().lower()
    conditions = [*_equality_conditions(params), *_range_conditions(params), *_text_conditions(text)]
    where = f" WHERE {' AND '.join(sql for sql, _ in conditions)}" if conditions else ""
    values = tuple(value for _, condition_values in conditions for value in condition_values)
    limit = min(MAX_LIMIT, parse_int("limit", params.get("limit", "100")))
    return Query(where, values, _order_by(params), parse_int("offset", params.get("offset", "0")), limit, text)


Condition = tuple[str, tuple[Any, ...]]


def _equality_conditions(params: Mapping[str, str]) -> Iterator[Condition]:
    for name, column in {"stop": "stop", "blame": "blame", "kind": "kind", "source": "source", "group": "grp"}.items():
        if name in params:
            yield f"{column} = ?", (params[name],)
    for name, column in (("tool", "tools"), ("outcome", "outcomes")):
        if name in params:
            yield f"instr({column}, ?) > 0", (f"{json.dumps(params[name], ensure_ascii=False)}:",)
    if "success" in params:
        if params["success"] not in SUCCESS_TESTS:
            raise InvalidQuery(f"success must be one of {', '.join(SUCCESS_TESTS)}")
        yield SUCCESS_TESTS[params["success"]], ()


def _range_conditions(params: Mapping[str, str]) -> Iterator[Condition]:
    if "step" in params:
        yield "step BETWEEN ? AND ?", parse_span(params["step"])
    for name, sign in (("least", ">="), ("most", "<=")):
        if name in params:
            yield f"reward {sign} ?", (_parse_number(name, params[name]),)


def _text_conditions(words: str) -> Iterator[Condition]:
    if words:
        like = "%" + words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        columns = " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for column in SEARCHED_COLUMNS)
        in_results = "place IN (SELECT place FROM found WHERE words = ?)"
        yield f"({columns} OR {in_results})", (*[like] * len(SEARCHED_COLUMNS), words)


def _order_by(params: Mapping[str, str]) -> str:
    sort = params.get("sort", "place")
    down = sort.startswith("-")
    column = sort.removeprefix("-")
    if column not in SORT_COLUMNS:
        columns = ", ".join(sorted(SORT_COLUMNS))
        raise InvalidQuery(f"rollouts are sorted by one of {columns}; a leading `-` reverses the order")
    ways = "DESC" if down else "ASC"
    return f"{column} {ways} NULLS LAST" + ("" if column == "place" else ", place ASC")


def parse_span(text: str) -> tuple[int, int]:
    """The first and the last step of a range."""
    first, _, last = text.partition("-")
    try:
        return parse_int("", first), parse_int("", last or first)
    except InvalidQuery:
        raise InvalidQuery("a step is a number such as 12, or a range such as 10-20") from None


def _parse_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidQuery(f"{name} must be a number") from None


def parse_int(name: str, text: str) -> int:
    """A parameter as a non-negative integer."""
    if not text.isdecimal() or len(text) > len(str(MAX_INT)) or int(text) > MAX_INT:
        raise InvalidQuery(f"{name} must be an integer from 0 to {MAX_INT}")
    return int(text)


MAX_SEARCHES = 8
"""Searches whose progress is stored."""
ENTRIES_START = b'"entries":['
"""Follows packed ids and logprobs, in which any text may occur by chance."""


@dataclass
class SearchProgress:
    """The position of a search, and the index's number of rebuilds when it started."""

    rebuilds: int
    place: int = 0
    end: int = 0


class Search:
    """Full-text searches in a run's rollouts; thread-safe, one at a time."""

    def __init__(self, index: RolloutIndex) -> None:
        self._index = index
        self._lock = Lock()
        self._progress: OrderedDict[str, SearchProgress] = OrderedDict()

    def advance(self, words: str, for_s: float) -> int:
        """Continues a search for some time; returns the number of rollouts searched so far. `words` are lower case."""
        with self._lock:
            progress = self._progress.setdefault(words, SearchProgress(self._index.rebuilds))
            self._progress.move_to_end(words)
            if len(self._progress) > MAX_SEARCHES:
                old, _ = self._progress.popitem(last=False)
                self._index.execute_many("DELETE FROM found WHERE words = ?", [(old,)])
            if progress.rebuilds != self._index.rebuilds:
                progress = self._progress[words] = SearchProgress(self._index.rebuilds)
                self._index.execute_many("DELETE FROM found WHERE words = ?", [(words,)])
            matches = list(self._matches(words, progress, time.monotonic() + for_s))
            if matches:
                self._index.execute_many(
                    "INSERT OR IGNORE INTO found VALUES (?, ?)", [(words, place) for place in matches]
                )
            return progress.place

    def _matches(self, words: str, progress: SearchProgress, until: float) -> Iterator[int]:
        in_json = json.dumps(words, ensure_ascii=False)[1:-1]
        in_nested_json = json.dumps(in_json, ensure_ascii=False)[1:-1]  # Arguments are JSON within JSON.
        wanted = {in_json.encode("utf-8", "surrogatepass"), in_nested_json.encode("utf-8", "surrogatepass")}
        lower = bytes.lower if words.isascii() else _lower_unicode
        count = self._index.count
        if not count:
            return
        with self._index.file.open("rb") as stream:
            for line in iterate_lines(stream, progress.end):
                if not line.is_complete or progress.place >= count:
                    return
                text = lower(line.data[max(0, line.data.find(ENTRIES_START)) :])
                if any(form in text for form in wanted) and _contains(line.data, (words, in_json)):
                    yield progress.place
                progress.place, progress.end = progress.place + 1, line.end
                if time.monotonic() >= until:
                    return


def _contains(line: bytes, wanted: tuple[str, ...]) -> bool:
    """True if a text of the rollout, not only the file format, contains one of the words; False for damaged lines."""
    try:
        fields = json.loads(line.decode("utf-8", "surrogatepass"))
        return any(form in text.lower() for text in iterate_texts(fields) for form in wanted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _lower_unicode(text: bytes) -> bytes:
    """Lower case for all of Unicode, which is slower than `bytes.lower`."""
    return text.decode("utf-8", "replace").lower().encode()
