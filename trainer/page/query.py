"""What a table is asked for becomes SQL of our own words alone; what was typed is only ever a value in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SORTS = frozenset(
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
ROWS = 500
"""At one time, at the most."""
SHOWN = (
    "place, step, task, grp, idx, stop, reason, reward, success, turns, tokens, written, asked, cached, seconds, "
    "tools, calls, outcomes, blame, version, rewards, question, answer, kind"
)
LOOKED = ("task", "kind", "question", "answer", "reason")
MOST = 2**63 - 1
"""What a whole number may be in SQLite."""
SUCCESS = {"yes": "success = 1", "no": "success = 0", "none": "success IS NULL"}


class Unclear(ValueError):
    """What was asked for makes no sense; its text says what would."""


@dataclass(frozen=True, slots=True)
class Query:
    where: str
    given: tuple[Any, ...]
    order: str
    offset: int
    limit: int
    words: str
    """Looked for in the text of rollouts as well."""

    @property
    def rows(self) -> str:
        return f"SELECT {SHOWN} FROM rollouts{self.where} ORDER BY {self.order} LIMIT {self.limit} OFFSET {self.offset}"  # noqa: S608

    @property
    def total(self) -> str:
        return f"SELECT COUNT(*) AS total, AVG(reward) AS reward, AVG(success) AS success FROM rollouts{self.where}"  # noqa: S608


def query(asked: Mapping[str, str]) -> Query:
    """Of the parameters of a URL; empty ones ask for nothing."""
    asked = {name: value for name, value in asked.items() if value != ""}
    words = asked.get("q", "").strip().lower()
    tests = [*_alike(asked), *_between(asked), *_said(words)]
    where = f" WHERE {' AND '.join(test for test, _ in tests)}" if tests else ""
    given = tuple(value for _, values in tests for value in values)
    limit = min(ROWS, whole("limit", asked.get("limit", "100")))
    return Query(where, given, _order(asked), whole("offset", asked.get("offset", "0")), limit, words)


Test = tuple[str, tuple[Any, ...]]


def _alike(asked: Mapping[str, str]) -> Iterator[Test]:
    for name, column in (("stop", "stop"), ("blame", "blame"), ("kind", "kind"), ("group", "grp")):
        if name in asked:
            yield f"{column} = ?", (asked[name],)
    for name, column in (("tool", "tools"), ("outcome", "outcomes")):
        if name in asked:
            yield f"instr({column}, ?) > 0", (f"{json.dumps(asked[name], ensure_ascii=False)}:",)
    if "success" in asked:
        yield _one("success", asked["success"], SUCCESS), ()


def _between(asked: Mapping[str, str]) -> Iterator[Test]:
    if "step" in asked:
        yield "step BETWEEN ? AND ?", _span(asked["step"])
    for name, sign in (("least", ">="), ("most", "<=")):
        if name in asked:
            yield f"reward {sign} ?", (_number(name, asked[name]),)


def _said(words: str) -> Iterator[Test]:
    if words:
        like = "%" + words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        columns = " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for column in LOOKED)
        found = "place IN (SELECT place FROM found WHERE words = ?)"
        yield f"({columns} OR {found})", (*[like] * len(LOOKED), words)


def _order(asked: Mapping[str, str]) -> str:
    sort = asked.get("sort", "place")
    down = sort.startswith("-")
    column = sort.removeprefix("-")
    if column not in SORTS:
        raise Unclear(f"rollouts are sorted by one of {', '.join(sorted(SORTS))}; a `-` before it turns it round")
    ways = "DESC" if down else "ASC"
    return f"{column} {ways} NULLS LAST" + ("" if column == "place" else ", place ASC")


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        return whole("", first), whole("", last or first)
    except Unclear:
        raise Unclear("a step is a number, as 12, or a span of them, as 10-20") from None


def _one(name: str, text: str, known: Mapping[str, str]) -> str:
    if text not in known:
        raise Unclear(f"{name} is one of {', '.join(known)}")
    return known[text]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Unclear(f"{name} is a number") from None


def whole(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MOST)) or int(text) > MOST:
        raise Unclear(f"{name} is a whole number from 0 to {MOST}")
    return int(text)
