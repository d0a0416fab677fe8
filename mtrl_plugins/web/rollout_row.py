"""Reads a rollout's row for the table of the web UI, and its tool calls, from its line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from math import fsum, isfinite
from typing import Any

from gateway.types import Outcome
from mtrl_plugins.web.success_criterion import SuccessCriterion
from trainer.ledger import Author
from trainer.rollout.rollout import StopReason
from trainer.storage.rollout_summary import RolloutSummary, list_entries
from trainer.view.text import to_printable

EXCERPT_CHARS = 160
"""Characters of a question or answer in a row."""
BLAME_OF_STOP = {
    StopReason.WALL_TIME: "time",
    StopReason.ENGINE_FAILED: "engine",
    StopReason.TOOL_FAILED: "tool",
    StopReason.MISALIGNED: "engine",
    StopReason.AGENT_FAILED: "agent",
    StopReason.WORKER_LOST: "worker",
    StopReason.CANCELLED: "caller",
    StopReason.ERROR: "plug-in",
}
"""What to blame for each stop reason that is not the policy's fault."""
INFRASTRUCTURE_OUTCOMES = frozenset(outcome.value for outcome in Outcome if outcome.is_infrastructure)


COLUMNS = (
    "place", "start", "end", "step", "task", "grp", "idx", "stop", "reason", "reward", "success", "turns", "tokens",
    "written", "asked", "cached", "seconds", "tools", "calls", "outcomes", "blame", "version", "rewards", "question",
    "answer", "kind", "source",
)  # fmt: skip
Row = tuple[Any, ...]
"""The values of `COLUMNS`."""
Call = tuple[int, int, str, str, float | None]
"""Of one tool call: the rollout's place, its step or 0, the tool, the outcome, and the seconds that it took."""


def read_row(place: int, start: int, line: bytes, criterion: SuccessCriterion) -> tuple[Row, list[Call]]:
    """The row of a rollout's line, and its calls.

    Raises ValueError, KeyError, TypeError or AttributeError for a damaged line.
    """
    fields = json.loads(line.decode("utf-8", "surrogatepass"))
    summary, entries = RolloutSummary.from_fields(fields), [*chain.from_iterable(list_entries(fields))]
    turns = [entry for entry in entries if entry["author"] == Author.POLICY]
    success = criterion.is_success(summary.rewards)
    row = (
        place,
        start,
        start + len(line),
        summary.step,
        summary.task,
        summary.group,
        summary.index,
        summary.stop,
        summary.reason,
        summary.reward,
        success,
        summary.turns,
        summary.tokens,
        summary.written,
        summary.asked,
        summary.cached,
        fsum(fields.get("timing", {}).values()),
        _counts_to_json(summary.tools),
        summary.tools.total(),
        _counts_to_json(summary.outcomes),
        find_blame(summary.stop, success, summary.outcomes),
        min((turn["version"] for turn in turns if "version" in turn), default=None),
        json.dumps(summary.rewards),
        _excerpt(_question(entries)),
        _excerpt(_answer(turns)),
        _excerpt(summary.kind),
        _excerpt(_source(entries)),
    )
    return row, [*_read_calls(place, summary.step or 0, entries)]


def find_blame(stop: str, success: bool | None, outcomes: Mapping[str, int]) -> str:
    """What caused the failure: the policy, a tool or other infrastructure; empty for a success, or if it is unknown."""
    if stop in BLAME_OF_STOP:
        return BLAME_OF_STOP[StopReason(stop)]
    if success is not False:
        return ""
    return "tool" if INFRASTRUCTURE_OUTCOMES & outcomes.keys() else "policy"


def _counts_to_json(counted: Mapping[str, int]) -> str:
    """Counts as JSON, in descending order."""
    return json.dumps(dict(sorted(counted.items(), key=lambda item: (-item[1], item[0]))), ensure_ascii=False)


def _source(entries: list[Mapping[str, Any]]) -> str:
    """The file or data set of the task, without the line."""
    source = str(entries[0].get("source", "")) if entries else ""
    name, _, line = source.rpartition(":")
    return name if line.isdecimal() else source


def _read_calls(place: int, step: int, entries: list[Mapping[str, Any]]) -> Iterator[Call]:
    """The answered tool calls."""
    for entry in entries:
        for tool in entry.get("info", {}).get("tools", ()) if entry["author"] == Author.TOOL else ():
            seconds = tool.get("elapsed_s")
            yield place, step, _excerpt(str(tool["name"])), str(tool["outcome"]), seconds if _is_time(seconds) else None


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value) and value >= 0


def _question(entries: list[Mapping[str, Any]]) -> str:
    """The last user message of the prompt, or else its last message."""
    messages = [message for entry in entries[:1] for message in entry.get("messages", ())]
    users = [message for message in messages if message.get("role") == "user"] or messages
    return _message_text(users[-1]) if users else ""


def _answer(turns: list[Mapping[str, Any]]) -> str:
    messages = [message for turn in turns[-1:] for message in turn.get("messages", ())]
    return _message_text(messages[-1]) if messages else ""


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in parts if isinstance(part, dict))


def _excerpt(text: str) -> str:
    return to_printable(" ".join(text[: 4 * EXCERPT_CHARS].split()))[:EXCERPT_CHARS]
