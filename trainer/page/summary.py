"""A row of the table is read off a rollout's line as it stands: no picture is opened and no ledger is made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import fsum
from typing import Any

from gateway.types import Outcome
from trainer.run.credits import STEP
from trainer.run.rollout import StopReason, worth
from trainer.view.mark import Mark
from trainer.view.text import printable

EXCERPT = 160
"""Characters of a question or an answer."""
SURROUNDS = {
    StopReason.WALL_TIME: "time",
    StopReason.ENGINE_FAILED: "engine",
    StopReason.TOOL_FAILED: "tool",
    StopReason.MISALIGNED: "engine",
    StopReason.CANCELLED: "caller",
    StopReason.ERROR: "plug-in",
}
"""Who a failure is of, where the policy is not to blame."""
INFRASTRUCTURE = frozenset(outcome.value for outcome in Outcome if outcome.infrastructure)


COLUMNS = (
    "place", "start", "end", "step", "task", "grp", "idx", "stop", "reason", "reward", "success", "turns", "tokens",
    "written", "asked", "cached", "seconds", "tools", "calls", "outcomes", "blame", "version", "rewards", "question",
    "answer", "kind",
)  # fmt: skip
Row = tuple[Any, ...]
"""What stands in each of the columns."""


def row(place: int, start: int, line: bytes, mark: Mark) -> Row:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is no rollout."""
    told = json.loads(line.decode("utf-8", "surrogatepass"))
    ledgers = [ledger.get("entries", ()) for ledger in (*told.get("earlier", ()), told)]
    entries = [entry for ledger in ledgers for entry in ledger]
    turns = [entry for entry in entries if entry["author"] == "policy"]
    rewards: dict[str, float] = told.get("rewards", {})
    group, success = str(told["group"]), mark.success(rewards)
    named = STEP.match(group)
    outcomes = Counter(outcome for entry in entries for outcome in entry.get("outcomes", ()))
    tools = Counter(call[1] for turn in turns for call in turn.get("calls", ()))
    return (
        place,
        start,
        start + len(line),
        told.get("step", int(named[1]) if named else None),
        told["task"],
        group,
        int(told["index"]),
        told["stop"],
        told["reason"],
        worth(rewards, told.get("weighed")),
        success,
        len(turns),
        sum(entry["n"] for entry in entries),
        sum(turn["n"] for turn in turns),
        sum(asked for ledger in ledgers for asked in _asked(ledger)),
        sum(turn.get("cached", 0) for turn in turns),
        fsum(told.get("timing", {}).values()),
        _listed(tools),
        sum(tools.values()),
        _listed(outcomes),
        blame(told["stop"], success, outcomes),
        min((turn["version"] for turn in turns if "version" in turn), default=None),
        json.dumps(rewards),
        _excerpt(_first(entries)),
        _excerpt(_last(turns)),
        _excerpt(told.get("kind", "")),
    )


def blame(stop: str, success: bool | None, outcomes: Mapping[str, int]) -> str:
    """The author of the failure; empty where it succeeded, or nobody says what success is."""
    if stop in SURROUNDS:
        return SURROUNDS[StopReason(stop)]
    if success is not False:
        return ""
    return "tool" if INFRASTRUCTURE & outcomes.keys() else "policy"


def _asked(entries: list[dict[str, Any]]) -> Iterator[int]:
    """Before each turn, so many tokens were there to be continued, media as wide as they are seen."""
    before = 0
    for entry in entries:
        if entry["author"] == "policy":
            yield before
        before += entry["n"]
        for (start, stop), width in zip(entry.get("spans", ()), entry.get("widths", ()), strict=False):
            before += width - (stop - start)


def _listed(counted: Mapping[str, int]) -> str:
    """As JSON, the commonest first."""
    return json.dumps(dict(sorted(counted.items(), key=lambda item: (-item[1], item[0]))), ensure_ascii=False)


def _first(entries: list[dict[str, Any]]) -> str:
    """The user's question, or whatever the rollout opens with."""
    messages = [message for entry in entries[:1] for message in entry.get("messages", ())]
    users = [message for message in messages if message.get("role") == "user"] or messages
    return _content(users[-1]) if users else ""


def _last(turns: list[dict[str, Any]]) -> str:
    messages = [message for turn in turns[-1:] for message in turn.get("messages", ())]
    return _content(messages[-1]) if messages else ""


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in parts if isinstance(part, dict))


def _excerpt(text: str) -> str:
    return printable(" ".join(text[: 4 * EXCERPT].split()))[:EXCERPT]
