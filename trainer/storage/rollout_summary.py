"""What a table shows of a rollout: counts and scores, read from its line without decoding tokens or media."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trainer.ledger import Author
from trainer.rollout.rollout import StopReason, total_reward
from trainer.storage.rollout_line import load_fields
from trainer.storage.token_credit import GROUP_STEP


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """Counts and scores of a rollout."""

    task: str
    group: str
    index: int
    step: int | None
    stop: str
    reason: str
    kind: str
    rewards: Mapping[str, float]
    reward: float | None
    turns: int
    tokens: int
    written: int
    """Tokens of the policy."""
    asked: int
    """Input tokens of all turns, media at full width."""
    cached: int
    tools: Counter[str]
    """Calls by tool."""
    outcomes: Counter[str]
    question: str
    """The task's last message, as JSON: system prompts and examples before it may be the run's own. Empty where it is
    an agent's, or has media, whose placeholders are the model's."""

    @property
    def is_infrastructure(self) -> bool:
        """True if the policy is not to blame for its end."""
        return any(reason.is_infrastructure for reason in StopReason if reason == self.stop)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The summary of a line's JSON. Raises ValueError, KeyError, TypeError or AttributeError for a damaged one."""
        ledgers = list_entries(fields)
        entries = [entry for ledger in ledgers for entry in ledger]
        turns = [entry for entry in entries if entry["author"] == Author.POLICY]
        rewards: Mapping[str, float] = fields.get("rewards", {})
        step_in_name = GROUP_STEP.match(str(fields["group"]))
        return cls(
            task=fields["task"],
            group=str(fields["group"]),
            index=int(fields["index"]),
            step=fields.get("step", int(step_in_name[1]) if step_in_name else None),
            stop=fields["stop"],
            reason=fields["reason"],
            kind=fields.get("kind", ""),
            rewards=rewards,
            reward=total_reward(rewards, fields.get("weighed")),
            turns=len(turns),
            tokens=sum(entry["n"] for entry in entries),
            written=sum(turn["n"] for turn in turns),
            asked=sum(tokens for ledger in ledgers for tokens in _input_tokens(ledger)),
            cached=sum(turn.get("cached", 0) for turn in turns),
            tools=Counter(call[1] for turn in turns for call in turn.get("calls", ())),
            outcomes=Counter(outcome for entry in entries for outcome in entry.get("outcomes", ())),
            question=_read_question(ledgers[0]),
        )


def load_summary(line: bytes) -> RolloutSummary:
    """The summary of a line. Raises ValueError for a damaged line or another format version."""
    try:
        return RolloutSummary.from_fields(load_fields(line))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the line is damaged ({type(error).__name__}: {error})") from error


def list_entries(fields: Mapping[str, Any]) -> list[Sequence[Mapping[str, Any]]]:
    """The entries of each ledger of a line's JSON."""
    return [ledger.get("entries", ()) for ledger in (*fields.get("earlier", ()), fields)]


def _read_question(entries: Sequence[Mapping[str, Any]]) -> str:
    first: Mapping[str, Any] = entries[0] if entries else {"author": None}
    if first["author"] != Author.TASK or first.get("parts") or first.get("source") == "agent":
        return ""
    last: Mapping[str, Any] = [{}, *first.get("messages", ())][-1]
    content = last.get("content")
    return json.dumps(content if isinstance(content, str) else [part.get("text") for part in content or ()])


def _input_tokens(entries: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """The input tokens of each turn's request, with media expanded."""
    before = 0
    for entry in entries:
        if entry["author"] == Author.POLICY:
            yield before
        before += entry["n"]
        for (start, stop), width in zip(entry.get("spans", ()), entry.get("widths", ()), strict=False):
            before += width - (stop - start)
