"""A small sample run in which each character is a token."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import Image, Outcome, Text, ToolCall
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason


def text_to_ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def policy(text: str, *calls: ToolCall, cached: int = 0, version: int | None = 3) -> Entry:
    logprobs = tuple(-0.5 for _ in text)
    message = {"role": "assistant", "content": text}
    return Entry(
        Author.POLICY,
        text_to_ids(text),
        (message,),
        logprobs,
        version=version,
        cached_tokens=cached,
        finish_reason="stop",
        calls=calls,
    )


LEDGER = Ledger(
    (
        Entry(
            Author.TASK,
            text_to_ids("Add 1 and 2."),
            ({"role": "user", "content": "Add 1 and 2."},),
            source="data.jsonl:1",
        ),
        policy("<sum>", ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "look"), cached=4),
        Entry(
            Author.TOOL,
            text_to_ids("3##!"),
            ({"role": "tool", "content": [{"type": "text", "text": "3"}, {"type": "image"}]},),
            parts=(Text("3"), Image(b"four")),
            spans=((1, 3),),
            outcomes=(Outcome.OK,),
            reward=0.5,
            source="add",
        ),
        policy("It is 3", cached=20),
        Entry(Author.FEEDBACK, (), ({"role": "user", "content": "Right."},), reward=1.0, source="gsm8k"),
    )
)
SCORED = Rollout("one", LEDGER, StopReason.FEEDBACK_DONE, "g", 1, rewards={"call": 0.5, "feedback": 1.0})
FAILED = Rollout("two", LEDGER, StopReason.TOOL_FAILED, "g", 2, reason="server 'calc' is down", timing={"calling": 2.5})
RUN = [SCORED, FAILED]
