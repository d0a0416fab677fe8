"""A model's folder says how it is spoken to; where it does not, the reader is told what to add."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SHIPPED: Mapping[str, Path] = {"qwen2_vl": Path(__file__).with_name("qwen2_vl.jinja")}
"""Chat templates that come with the package, for families whose own write no calls: Qwen2-VL and Qwen2.5-VL."""


def tokenizer_of(source: str | Path | PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, or the one given, if it can be used at all."""
    tokenizer = _loaded(Path(source)) if isinstance(source, str | Path) else source
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
            "give one by the setting `template.chat_template`, or put a chat_template.jinja into the folder",
        )
    if isinstance(source, str | Path):
        _fits(Path(source) / "config.json", tokenizer)
    return tokenizer


def _fits(config: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Into the model's vocabulary; a folder without a model is asked by whoever needs one."""
    try:
        told = json.loads(config.read_text(encoding="utf-8"))
        size = int(told.get("text_config", told)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise TemplateError(
            f"the tokenizer of '{config.parent}' has ids up to {largest}, and the model has {size} of them, from 0",
            "copy the tokenizer that the model was made with into its folder",
        )


def _loaded(folder: Path) -> PreTrainedTokenizerFast:
    if not folder.is_dir():
        raise TemplateError(f"'{folder}' is no folder", "download the model and give the folder that holds it")
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise TemplateError(f"'{folder}' has no tokenizer", "copy tokenizer.json and tokenizer_config.json into it")
    from transformers import AutoTokenizer  # here, because the import costs most of a second

    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken file makes the loader raise
        raise TemplateError(f"the tokenizer of '{folder}' does not load: {error}", "copy its files anew") from error
    return cast("PreTrainedTokenizerFast", loaded)


def stops_of(source: str | Path | PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that end a turn: of the tokenizer, and of the folder's generation_config.json."""
    folder = Path(source if isinstance(source, str | Path) else tokenizer.name_or_path or "/nowhere")
    ids = [tokenizer.get_added_vocab()[str(tokenizer.eos_token)]]
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            more = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise TemplateError(f"'{file}' is no JSON object: {error}", "copy it anew, or remove it") from error
        ids += [more] if isinstance(more, int) else more or []
    return tuple(dict.fromkeys(ids))
