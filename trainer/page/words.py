"""The text of each token by itself, from the tokenizer's own file: nothing of a model is woken up to read a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.view.text import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
BROKEN = "\ufffd"
MOST = 8
"""Tokens that a character is made of, at the most; beyond that it is no character."""


class Words:
    """Pieces of text, one for each id; characters that several ids make together stand with the first of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # Some decoders trim the start of what they are given, so that something known stands before it.
        self._anchor = next(((id, token.content) for id, token in sorted(added.items())), None)
        self._known: dict[int, str] = {}

    @classmethod
    def of(cls, model: Path) -> Words:
        """Raises ValueError, in words for the reader, where the model's folder has none or is gone."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ValueError("the package `tokenizers` is not there: pip install -e '.[tokens]'") from error
        file = model / FILE
        if not file.is_file():
            raise ValueError(f"{file} is not there any more")
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # boundary: of a broken file the package raises bare Exceptions
            raise ValueError(f"{file} cannot be read: {error}") from error

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """As many as there are ids. What acts instead of being seen stands as its code."""
        found: list[str] = []
        while len(found) < len(ids):
            at = len(found)
            text, many = self._one(ids[at]), 1
            while text.endswith(BROKEN) and many < MOST and at + many < len(ids):
                many += 1
                text = self._decode(ids[at : at + many])
            if text.endswith(BROKEN):
                text, many = self._one(ids[at]), 1
            found += [printable(text), *[""] * (many - 1)]
        return found

    def text(self, ids: Sequence[int]) -> str:
        return printable(self._decode(ids))

    def _one(self, id: int) -> str:
        if id not in self._known:
            self._known[id] = self._decode([id])
        return self._known[id]

    def _decode(self, ids: Sequence[int]) -> str:
        if self._anchor is None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        id, text = self._anchor
        return str(self._tokenizer.decode([id, *ids], skip_special_tokens=False)).removeprefix(text)
