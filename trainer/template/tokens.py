"""What a message says is text: only the template, and the policy itself, write control tokens.

Look-alikes in messages (`<|im_end|>` in a web page) are fenced before the template sees them, by two code points that
Unicode keeps for such inner use. What stands in a fence is encoded as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .known import Known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OPEN, SHUT = "\ufdd0", "\ufdd1"
_FENCE = re.compile(f"[{OPEN}{SHUT}]")
_BARRED = re.compile("<[|\uff5c].*[|\uff5c]>")
"""The shape of tokens that begin and end turns; not every model's files call them special."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_STRUCTURE = frozenset({"type", "function", "name", "description", "parameters", "properties", "required", "arguments"})


class Tokens:
    """Text to ids and back, with control tokens only where they are meant."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        # Runs of white space, which some tokenizers add as tokens, control nothing.
        added = {id: token for id, token in self._backend.get_added_tokens_decoder().items() if token.content.strip()}
        self.control: Mapping[str, int] = {token.content: id for id, token in added.items()}
        self.special = frozenset(t.content for t in added.values() if t.special or _BARRED.fullmatch(t.content))
        self._ids = frozenset(self.control.values())
        self._any = _either(self.control)
        self._special = _either(self.special)
        self._suspect = re.compile("|".join((_FENCE.pattern, _SURROGATE.pattern, self._any.pattern)))
        self._written = re.compile(f"(?<!{OPEN})({self._any.pattern})")
        self._bracketed = frozenset(token[1:-1].lstrip("/") for token in self.control) - _STRUCTURE
        eos = str(tokenizer.eos_token)
        self._anchor = self.control[eos], eos
        self._encoded: Known[tuple[str, str], tuple[int, ...]] = Known()

    def fenced(self, value: Any, *, markup: bool = False) -> Any:
        """`value` with fences around what looks like a control token, and without what no tokenizer can encode.

        `markup` lets through tokens that are not special, as `<think>`: an operator and the policy may mean them.
        """
        if isinstance(value, str):
            if not self._suspect.search(value):  # as nearly always
                return value
            pattern = self._special if markup else self._any
            return pattern.sub(f"{OPEN}\\g<0>{SHUT}", _SURROGATE.sub("\ufffd", plain(value)))
        if isinstance(value, Mapping):
            return {self._key(key, markup): self.fenced(item, markup=markup) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.fenced(item, markup=markup) for item in value]
        return value

    def _key(self, key: Any, markup: bool) -> Any:
        """Some templates write a schema's keys as tags, so that `|im_end|` as a key would become a token."""
        if not isinstance(key, str):
            return key
        return f"{OPEN}{key}{SHUT}" if key.lstrip("/") in self._bracketed else self.fenced(key, markup=markup)

    def encode(self, text: str, *, after: str = "") -> tuple[int, ...]:
        """The ids of `text` where it follows the control token `after`, which some tokenizers take into account."""
        return self._encoded.of((text, after), lambda: self._anew(text, after))

    def _anew(self, text: str, after: str) -> tuple[int, ...]:
        if after:
            ids = self._encode(after + text)
            if ids[0] == self.control[after]:
                return tuple(ids[1:])
        return tuple(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        meant = [self.control[token] for token in self._written.findall(text)]
        if not _FENCE.search(text):
            ids = self._natural(text)
            if [id for id in ids if id in self._ids] == meant:
                return ids
        # A fence, or a tokenizer that makes a control token of what is none (as by its normalizer): piece by piece.
        ids = []
        for place, piece in enumerate(self._written.split(text)):
            ids += [self.control[piece]] if place % 2 else self._plain(plain(piece), begins=not place)
        return ids

    def _natural(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _plain(self, text: str, *, begins: bool = False) -> list[int]:
        """Ids of text in which nothing is a control token; some tokenizers write a text's beginning differently."""
        ids = self._natural(text) if begins else self._natural(self._anchor[1] + text)[1:]
        if self._ids.isdisjoint(ids) or len(text) == 1:
            return ids
        cuts = [match.start() + 1 for match in self._any.finditer(text)] or range(1, len(text))
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return [id for place, piece in enumerate(pieces) for id in self._plain(piece, begins=begins and not place)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids from the middle of a conversation: some decoders trim the start of what they are given."""
        id, eos = self._anchor
        return str(self._backend.decode([id, *ids], skip_special_tokens=False)).removeprefix(eos)

    def last_special(self, text: str) -> str:
        """The last special token that stands unfenced in `text`, or nothing."""
        return next((token for token in reversed(self._written.findall(text)) if token in self.special), "")

    def first(self, text: str, among: Iterable[str]) -> tuple[int, str]:
        """Where the first of these tokens stands unfenced in `text`; its end, with no token, where there is none."""
        wanted = frozenset(among)
        found = (match for match in self._written.finditer(text) if match[1] in wanted)
        return next(((match.start(), match[1]) for match in found), (len(text), ""))


def plain(text: str) -> str:
    """Text without its fences, as a person reads it."""
    return _FENCE.sub("", text)


def _either(tokens: Iterable[str]) -> re.Pattern[str]:
    """The longest first, so that a token goes before those that it contains."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")
