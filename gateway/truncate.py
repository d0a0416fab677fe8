"""Truncates long results to a limit in characters or tokens, with a marker in place of the removed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from anyio import to_thread

from gateway.config.models import ResultLimit, Side
from gateway.errors import ConfigError
from gateway.types import Part, Text, ToolResult

THREAD_CHARS = 50_000
"""Longer texts are tokenized in a thread, so that other calls need not wait."""


def make_truncator(limit: ResultLimit | int | None) -> Truncator | None:
    """Creates the function that truncates results to `limit`; None without a limit."""
    if limit is None:
        return None
    if isinstance(limit, int):
        limit = ResultLimit(chars=limit)
    if limit.tokens is None or limit.tokenizer is None:
        return Truncator(limit.chars or 0, limit.side, None)
    return Truncator(limit.tokens, limit.side, _load_tokenizer(limit.tokenizer))


class Truncator:
    """Truncates all text of a result together, so that its parts share one limit."""

    def __init__(self, limit: int, side: Side, tokenizer: Any) -> None:
        self.limit, self.side, self.tokenizer = limit, side, tokenizer

    async def __call__(self, result: ToolResult) -> ToolResult:
        texts = [part.text for part in result.parts if isinstance(part, Text)]
        total = sum(len(text) for text in texts)
        if self.tokenizer is None and total <= self.limit:
            return result
        joined = "\n".join(texts)
        if self.tokenizer is None:
            text, removed = truncate_text(joined, self.limit, self.side)
        elif total <= THREAD_CHARS:
            text, removed = self._truncate_tokens(joined)
        else:
            text, removed = await to_thread.run_sync(self._truncate_tokens, joined, abandon_on_cancel=True)
        if not removed:
            return result
        metrics = {**result.metrics, "cut": removed}
        return replace(result, parts=_replace_text(result.parts, text), metrics=metrics)

    def _truncate_tokens(self, text: str) -> tuple[str, int]:
        """Truncates at token boundaries by character offsets, without decoding, so that the rest is unchanged."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= self.limit:
            return text, 0
        removed = len(offsets) - self.limit
        head, tail = split_budget(self.limit, self.side)
        start = offsets[head - 1][1] if head else 0
        end = offsets[len(offsets) - tail][0] if tail else len(text)
        return f"{text[:start]}{truncation_marker(removed, 'tokens')}{text[end:]}", removed


def truncate_text(text: str, limit: int, side: Side) -> tuple[str, int]:
    """The text shortened to `limit` characters plus a marker, and the number of characters removed."""
    removed = len(text) - limit
    if removed <= 0:
        return text, 0
    head, tail = split_budget(limit, side)
    return f"{text[:head]}{truncation_marker(removed, 'characters')}{text[len(text) - tail :]}", removed


def split_budget(limit: int, side: Side) -> tuple[int, int]:
    """How much to keep at the start and at the end if `side` is removed."""
    if side == "left":
        return 0, limit
    if side == "right":
        return limit, 0
    return limit - limit // 2, limit // 2


def truncation_marker(removed: int, unit: str) -> str:
    """The text that replaces what was removed."""
    return f"\n[... {removed} {unit} cut ...]\n"


def _replace_text(parts: Sequence[Part], text: str) -> tuple[Part, ...]:
    """Replaces the first text part with the truncated text and drops the others; media keep their order."""
    new_parts: list[Part] = []
    is_placed = False
    for part in parts:
        if not isinstance(part, Text):
            new_parts.append(part)
        elif not is_placed:
            new_parts.append(Text(text))
            is_placed = True
    return tuple(new_parts)


@lru_cache(maxsize=8)
def _load_tokenizer(path: str) -> Any:
    """Loads a tokenizer once, because it is large and shared by the tools of an entry."""
    try:
        from tokenizers import Tokenizer  # an optional dependency
    except ImportError as error:
        remedy = "pip install 'mtrl-rl[tokens]', or limit by `chars`"
        raise ConfigError("a limit in tokens needs `tokenizers`", field="result_limit", remedy=remedy) from error
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    remedy = "give a folder with a tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no tokenizer", field="result_limit", remedy=remedy)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # boundary: the library raises plain exceptions for a file that it cannot read
        raise ConfigError(
            f"{file} cannot be loaded as a tokenizer: {error}", field="result_limit", remedy=remedy
        ) from error
