"""Formats ledger text safely for terminals: control characters, which could move the cursor, are escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import fsum, isclose
from typing import Any

from trainer.ledger import Author, Entry, Message
from trainer.rollout.rollout import Rollout

Decode = Callable[[Sequence[int]], str]
"""The tokenizer's text of ids."""

STYLES = {Author.TASK: "blue", Author.POLICY: "bold green", Author.TOOL: "yellow", Author.FEEDBACK: "magenta"}
MAX_SHOWN_IDS = 32
"""Ids shown if there is neither a tokenizer nor messages."""


def to_printable(text: str) -> str:
    """The text with control codes, direction marks and lone surrogates escaped."""
    return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in text)


def to_line(text: str) -> str:
    """The printable text in one line, with line breaks and tabs escaped."""
    return to_printable(text).replace("\n", "\\n").replace("\t", "\\t")


def format_rewards(rollout: Rollout) -> str:
    """The components of a rollout's reward, with a note if the reward is a weighted sum."""
    components = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
    is_sum = isclose(rollout.reward or 0.0, fsum(rollout.rewards.values()), abs_tol=1e-9)
    return components if is_sum else f"{components}, weighted"


def format_share(part: int, total: int) -> str:
    """A share in percent."""
    return f"{part / total:.0%}" if total else "-"


def format_number(value: float | None) -> str:
    """A number, or a dash if there is none."""
    return "-" if value is None else f"{value:g}"


def format_duration(seconds: float) -> str:
    """A short duration in ms or s."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def entry_text(entry: Entry, decode: Decode | None) -> str:
    """The text of an entry's ids; without a tokenizer its messages, or else the ids."""
    if decode is not None and entry.ids:
        return to_printable(decode(entry.ids))
    if entry.messages:
        return to_printable("\n".join(map(_format_message, entry.messages)))
    more = len(entry.ids) - MAX_SHOWN_IDS
    return (
        f"ids {' '.join(map(str, entry.ids[:MAX_SHOWN_IDS]))}{f' and {more} more' if more > 0 else ''}"
        if entry.ids
        else ""
    )


def _format_message(message: Message) -> str:
    """A message as text, with JSON for contents that are not text."""
    role, content = message.get("role", "?"), message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    parts = [_format_value(content)] if content else []
    parts += [f"{key}: {_format_value(value)}" for key, value in rest.items()]
    return f"{role}: " + "\n".join(parts)


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _escape(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
