"""A family of models in small: its template, its control tokens, and a tokenizer trained on a few lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).with_name("templates")
_LINES = (
    "What is the capital of Peru? Lima, says the tool, and 12 * 7 = 84.",
    '{"type": "function", "function": {"name": "look_up", "arguments": {"word": "gnu"}}}',
    "user assistant system tool call response name arguments parameters properties required",
)
_CHAT = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """Its `special` tokens, and its `markup`: added tokens that are not special."""

    name: str
    parser: str
    special: tuple[str, ...] = _CHAT
    markup: tuple[str, ...] = _TAGS
    eos: str = "<|im_end|>"
    bos: str | None = None
    stops: tuple[str, ...] = ()
    """What the folder's generation_config.json names beside `eos`."""
    several: bool = True
    strips: bool = False
    """Takes earlier reasoning away."""

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip
_DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in (
        "begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep",
        "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end",
        "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end",
    )
)  # fmt: skip
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = tuple(
    f"<|{name}|>"
    for name in ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext", "startoftext")
)
_KIMI = (
    "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[BOS]", "[EOS]",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip

FAMILIES = {
    family.name: family
    for family in (
        Family("hermes", "hermes"),
        Family("qwen3", "hermes", strips=True),
        Family("qwq", "hermes", strips=True),
        Family("qwen3_coder", "qwen3_coder"),
        Family("llama3", "llama3", _LLAMA, (), "<|eot_id|>", "<|begin_of_text|>", several=False),
        Family("mistral", "mistral", _MISTRAL, (), "</s>", "<s>"),
        Family("deepseek", "deepseek_v3", _DEEPSEEK, (), _DEEPSEEK[1], _DEEPSEEK[0]),
        Family(
            "glm",
            "glm",
            _GLM,
            (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "<|endoftext|>",
            stops=("<|user|>", "<|observation|>"),
        ),
        Family("harmony", "harmony", _HARMONY, (), "<|return|>", stops=("<|call|>",), several=False),
        Family("kimi", "kimi", _KIMI, ()),
    )
}
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SEEING = {
    family.name: family
    for family in (
        Family("seeing", "hermes", (*_CHAT, *_VISION)),
        Family("broken_blinding", "hermes", (*_CHAT, *_VISION)),
        Family("stock_seeing", "", (*_CHAT, *_VISION)),
    )
}
"""Of models that see; the second one's template drops what tools show, and the third one's knows no tools."""
BROKEN = {
    family.name: family
    for family in (
        Family("broken_numbered", "hermes"),
        Family("broken_clocked", "hermes"),
        Family("broken_deaf", "hermes"),
        Family("broken_toolless", "hermes"),
        Family("broken_moving", "mistral", _MISTRAL, (), "</s>", "<s>"),
    )
}


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return str(tokenizer.to_str())


def tokenizer_for(family: Family, template: str | None = None, *, normalizing: bool = False) -> PreTrainedTokenizerFast:
    """`normalizing` makes one that takes wide letters for plain ones, even in its control tokens."""
    tokenizer = Tokenizer.from_str(_trained())
    if normalizing:
        tokenizer.normalizer = normalizers.NFKC()
    added = [AddedToken(token, special=True, normalized=normalizing) for token in family.special]
    tokenizer.add_special_tokens(added)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markup])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.eos,
        bos_token=family.bos,
        chat_template=template or family.template,
    )


def spaced_tokenizer_for(family: Family) -> PreTrainedTokenizerFast:
    """One that writes a space for the beginning of a text, as those of SentencePiece do."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*_LINES, "".join(map(chr, range(32, 127)))], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos, chat_template=family.template
    )


def folder_for(family: Family, folder: Path, template: str | None = None) -> Path:
    """A model's folder without its weights."""
    tokenizer = tokenizer_for(family, template)
    tokenizer.save_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (family.eos, *family.stops)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
