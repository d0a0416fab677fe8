"""Loads a model's tokenizer, and encodes text so that control tokens in messages stay plain text.

Only the template and the policy write control tokens. Look-alikes in messages, such as `<|im_end|>` in a web page, are
fenced before the template sees them, with two code points that Unicode reserves for internal use; fenced text is
encoded as ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import pretrained
from trainer.template.errors import TemplateError
from trainer.template.render_cache import RenderCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


OPEN, SHUT = "\ufdd0", "\ufdd1"
_FENCE = re.compile(f"[{OPEN}{SHUT}]")
_TURN_TOKEN = re.compile("<[|\uff5c].*[|\uff5c]>")
"""The form of tokens that begin and end turns; not every model marks them as special."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_SCHEMA_KEYS = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "arguments"}
)


class FencedTokenizer:
    """Encodes and decodes text, with control tokens only where they are not fenced."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.size = self._backend.get_vocab_size()
        """The number of tokens."""
        # Some tokenizers add runs of white space as tokens; these control nothing.
        added = {id: token for id, token in self._backend.get_added_tokens_decoder().items() if token.content.strip()}
        self.control_ids: Mapping[str, int] = {token.content: id for id, token in added.items()}
        self.special_tokens = frozenset(
            token.content for token in added.values() if token.special or _TURN_TOKEN.fullmatch(token.content)
        )
        self._control_id_set = frozenset(self.control_ids.values())
        self._control = _match_any(self.control_ids)
        self._special = _match_any(self.special_tokens)
        self._suspicious = re.compile("|".join((_FENCE.pattern, _SURROGATE.pattern, self._control.pattern)))
        self._unfenced = re.compile(f"(?<!{OPEN})({self._control.pattern})")
        self._bracketed = frozenset(token[1:-1].lstrip("/") for token in self.control_ids) - _SCHEMA_KEYS
        eos = str(tokenizer.eos_token)
        self._anchor = self.control_ids[eos], eos
        self._cache: RenderCache[tuple[str, str], tuple[int, ...]] = RenderCache()

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids."""
        vocabulary: Mapping[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def fence(self, value: Any, *, markup: bool = False) -> Any:
        """`value` with fences around what looks like a control token, and without what no tokenizer can encode.

        `markup` leaves tokens that are not special, such as `<think>`, which operators and the policy write on purpose.
        """
        if isinstance(value, str):
            if not self._suspicious.search(value):  # The common case.
                return value
            pattern = self._special if markup else self._control
            return pattern.sub(f"{OPEN}\\g<0>{SHUT}", _SURROGATE.sub("\ufffd", strip_fences(value)))
        if isinstance(value, Mapping):
            return {self._fence_key(key, markup): self.fence(item, markup=markup) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.fence(item, markup=markup) for item in value]
        return value

    def _fence_key(self, key: Any, markup: bool) -> Any:
        """Some templates write a schema's keys as tags, so that `|im_end|` as a key would become a token."""
        if not isinstance(key, str):
            return key
        return f"{OPEN}{key}{SHUT}" if key.lstrip("/") in self._bracketed else self.fence(key, markup=markup)

    def encode(self, text: str, *, after: str = "") -> tuple[int, ...]:
        """The ids of `text` after the control token `after`, which affects some tokenizers."""
        return self._cache.get((text, after), lambda: self._encode_after(text, after))

    def _encode_after(self, text: str, after: str) -> tuple[int, ...]:
        if after:
            ids = self._encode(after + text)
            if ids[0] == self.control_ids[after]:
                return tuple(ids[1:])
        return tuple(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        expected = [self.control_ids[token] for token in self._unfenced.findall(text)]
        if not _FENCE.search(text):
            ids = self._encode_directly(text)
            if [id for id in ids if id in self._control_id_set] == expected:
                return ids
        # There is a fence, or the tokenizer's normalizer creates control tokens: encode piece by piece.
        ids = []
        for index, piece in enumerate(self._unfenced.split(text)):
            if index % 2:
                ids.append(self.control_ids[piece])
            else:
                ids += self._encode_plain(strip_fences(piece), is_start=not index)
        return ids

    def _encode_directly(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        """Ids of text without control tokens; some tokenizers encode the start of a text differently."""
        ids = self._encode_directly(text) if is_start else self._encode_directly(self._anchor[1] + text)[1:]
        if self._control_id_set.isdisjoint(ids) or len(text) == 1:
            return ids
        cuts = [match.start() + 1 for match in self._control.finditer(text)] or range(1, len(text))
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return [
            id
            for index, piece in enumerate(pieces)
            for id in self._encode_plain(piece, is_start=is_start and not index)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. They follow an anchor token, since some decoders trim the start of a text."""
        id, eos = self._anchor
        return str(self._backend.decode([id, *ids], skip_special_tokens=False)).removeprefix(eos)

    def find_last_special(self, text: str) -> str:
        """The last unfenced special token in `text`; empty if there is none."""
        return next((token for token in reversed(self._unfenced.findall(text)) if token in self.special_tokens), "")

    def is_blank(self, text: str) -> bool:
        """Whether the text has nothing but white space and unfenced control tokens."""
        return not self._unfenced.sub("", text).strip()

    def find_first(self, text: str, tokens: Iterable[str]) -> tuple[int, str]:
        """Index and text of the first of these tokens that is unfenced in `text`; its length and "" if none is."""
        wanted = frozenset(tokens)
        matches = (match for match in self._unfenced.finditer(text) if match[1] in wanted)
        return next(((match.start(), match[1]) for match in matches), (len(text), ""))


def strip_fences(text: str) -> str:
    """The text without fences."""
    return _FENCE.sub("", text)


def _match_any(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern of these tokens, the longest first, so that a token precedes those that it contains."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")


BUILTIN_TEMPLATES: Mapping[str, Path] = {"qwen2_vl": Path(__file__).with_name("qwen2_vl.jinja")}
"""Chat templates in this package, for families whose own write no calls: Qwen2-VL and Qwen2.5-VL."""


def load_tokenizer(source: str | Path | PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, or the given one. Raises TemplateError if it lacks something."""
    tokenizer = _load_from_folder(Path(source)) if isinstance(source, str | Path) else source
    where = f"'{source}'" if isinstance(source, str | Path) else "the tokenizer"
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TemplateError(f"{where} has no fast tokenizer", "convert it, so that the folder has a tokenizer.json")
    if tokenizer.eos_token is None or tokenizer.eos_token not in tokenizer.get_added_vocab():
        raise TemplateError(
            f"{where} has no end-of-sequence token, so that nothing would end a turn",
            "set `eos_token` in tokenizer_config.json to one of its special tokens",
        )
    if template is None and not tokenizer.chat_template:
        raise TemplateError(
            f"{where} has no chat template",
            "set `template.chat_template`, or put a chat_template.jinja into the folder",
        )
    if isinstance(source, str | Path):
        _check_vocabulary(Path(source) / "config.json", tokenizer)
    return tokenizer


def _check_vocabulary(config_file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Checks that all ids are in the model's vocabulary; a folder without a model passes."""
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        size = int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise TemplateError(
            f"the tokenizer of '{config_file.parent}' has ids up to {largest}, but the model's vocabulary"
            f" has size {size}",
            "copy the tokenizer that belongs to the model into its folder",
        )


def _load_from_folder(folder: Path) -> PreTrainedTokenizerFast:
    if not folder.is_dir():
        raise TemplateError(f"'{folder}' is not a folder", "download the model and give the folder that contains it")
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise TemplateError(f"'{folder}' has no tokenizer", "copy tokenizer.json and tokenizer_config.json into it")
    try:
        return pretrained.load_tokenizer(folder)
    except pretrained.ModelCodeError:
        raise
    except Exception as error:  # boundary: the loader may raise anything for a broken file
        raise TemplateError(f"cannot load the tokenizer of '{folder}': {error}", "copy its files again") from error


def load_stop_ids(source: str | Path | PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that end a turn, from the tokenizer and the folder's generation_config.json."""
    folder = Path(source if isinstance(source, str | Path) else tokenizer.name_or_path or "/nowhere")
    ids = [tokenizer.get_added_vocab()[str(tokenizer.eos_token)]]
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            eos_ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise TemplateError(f"'{file}' is not a JSON object: {error}", "copy it again, or remove it") from error
        ids += [eos_ids] if isinstance(eos_ids, int) else eos_ids or []
    return tuple(dict.fromkeys(ids))
