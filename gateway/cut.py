"""A result longer than the policy can read is cut where it was told to, and says so where it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from anyio import to_thread

from gateway.config.models import ResultLimit, Side
from gateway.errors import ConfigError
from gateway.types import Part, Text, ToolResult

LONG = 50_000
"""Characters whose tokens are counted in a thread: everyone else would wait for it."""


class Cutter(Protocol):
    async def __call__(self, result: ToolResult) -> ToolResult: ...


def cutter(limit: ResultLimit | int | None) -> Cutter:
    """What cuts results to `limit`; without one, results pass whole."""
    if limit is None:
        return _whole
    if isinstance(limit, int):
        limit = ResultLimit(chars=limit)
    if limit.tokens is None or limit.tokenizer is None:
        return _Cut(limit.chars or 0, limit.side, None)
    return _Cut(limit.tokens, limit.side, _tokenizer(limit.tokenizer))


async def _whole(result: ToolResult) -> ToolResult:
    return result


class _Cut:
    """Cuts the text of a result as one whole, so that several parts share one budget."""

    def __init__(self, most: int, side: Side, tokenizer: Any) -> None:
        self.most, self.side, self.tokenizer = most, side, tokenizer

    async def __call__(self, result: ToolResult) -> ToolResult:
        texts = [part.text for part in result.parts if isinstance(part, Text)]
        total = sum(len(text) for text in texts)
        if self.tokenizer is None and total <= self.most:
            return result
        whole = "\n".join(texts)
        if self.tokenizer is None:
            kept, lost = cut(whole, self.most, self.side)
        elif total <= LONG:
            kept, lost = self._cut_tokens(whole)
        else:
            kept, lost = await to_thread.run_sync(self._cut_tokens, whole, abandon_on_cancel=True)
        if not lost:
            return result
        metrics = {**result.metrics, "cut": lost}
        return replace(result, parts=_with_text(result.parts, kept), metrics=metrics)

    def _cut_tokens(self, text: str) -> tuple[str, int]:
        """Cuts at token borders by their places in the text; nothing is decoded, so what stays is as it came."""
        places = self.tokenizer.encode(text, add_special_tokens=False).offsets
        if len(places) <= self.most:
            return text, 0
        lost = len(places) - self.most
        head, tail = split(self.most, self.side)
        start = places[head - 1][1] if head else 0
        end = places[len(places) - tail][0] if tail else len(text)
        return f"{text[:start]}{marker(lost, 'tokens')}{text[end:]}", lost


def cut(text: str, most: int, side: Side) -> tuple[str, int]:
    """At most `most` characters of `text` around a marker, and how many were lost."""
    lost = len(text) - most
    if lost <= 0:
        return text, 0
    head, tail = split(most, side)
    return f"{text[:head]}{marker(lost, 'characters')}{text[len(text) - tail :]}", lost


def split(most: int, side: Side) -> tuple[int, int]:
    """How much is kept at the head and at the tail when `side` is cut away."""
    if side == "left":
        return 0, most
    if side == "right":
        return most, 0
    return most - most // 2, most // 2


def marker(lost: int, unit: str) -> str:
    return f"\n[... {lost} {unit} cut ...]\n"


def _with_text(parts: Sequence[Part], text: str) -> tuple[Part, ...]:
    """The cut text stands where the first text stood; the other parts keep their order."""
    kept: list[Part] = []
    placed = False
    for part in parts:
        if not isinstance(part, Text):
            kept.append(part)
        elif not placed:
            kept.append(Text(text))
            placed = True
    return tuple(kept)


@lru_cache(maxsize=8)
def _tokenizer(path: str) -> Any:
    """Read once: it is large, and the tools of an entry share it."""
    try:
        from tokenizers import Tokenizer  # an extra: most gateways cut by characters
    except ImportError as error:
        remedy = "pip install -e '.[tokens]', or limit by `chars`"
        raise ConfigError("a limit in tokens needs `tokenizers`", field="result_limit", remedy=remedy) from error
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    remedy = "name a folder that holds tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer at {path}", field="result_limit", remedy=remedy)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # boundary: the library raises bare exceptions over a file that it cannot read
        raise ConfigError(f"{file} is no tokenizer: {error}", field="result_limit", remedy=remedy) from error
