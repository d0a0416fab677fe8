"""What models and tools wrote is shown to people as text only: it paints nothing, moves no cursor, hides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import fsum, isclose
from typing import Any

from trainer.ledger import Author, Entry, Message
from trainer.run.rollout import Rollout

Decode = Callable[[Sequence[int]], str]
"""A tokenizer's own text of ids."""

STYLES = {Author.TASK: "blue", Author.POLICY: "bold green", Author.TOOL: "yellow", Author.FEEDBACK: "magenta"}
FEW = 32
"""As many ids as stand in a line or two."""


def printable(text: str) -> str:
    """Whatever acts instead of being seen stands as its code: control codes, direction marks, halves of characters."""
    return "".join(char if char.isprintable() or char in "\n\t" else _code(char) for char in text)


def line(text: str) -> str:
    """The same in one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def parts(rollout: Rollout) -> str:
    """What its reward is made of; that they do not simply add up is said."""
    told = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
    alike = isclose(rollout.reward or 0.0, fsum(rollout.rewards.values()), abs_tol=1e-9)
    return told if alike else f"{told}, weighted"


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def said(entry: Entry, decode: Decode | None) -> str:
    """The text of the ids; without a tokenizer the messages that they say, or else the ids themselves."""
    if decode is not None and entry.ids:
        return printable(decode(entry.ids))
    if entry.messages:
        return printable("\n".join(map(_message, entry.messages)))
    more = len(entry.ids) - FEW
    return f"ids {' '.join(map(str, entry.ids[:FEW]))}{f' and {more} more' if more > 0 else ''}" if entry.ids else ""


def _message(message: Message) -> str:
    """As it was before a template rendered it: plain text where it is text, else JSON."""
    role, content = message.get("role", "?"), message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    parts = [_plain(content)] if content else []
    parts += [f"{key}: {_plain(value)}" for key, value in rest.items()]
    return f"{role}: " + "\n".join(parts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _code(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
