"""Miniature model families: a chat template, control tokens, and a tokenizer trained on a few lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).with_name("templates")
_TRAINING_TEXT = (
    "What is the capital of Peru? Lima, says the tool, and 12 * 7 = 84.",
    '{"type": "function", "function": {"name": "look_up", "arguments": {"word": "gnu"}}}',
    "user assistant system tool call response name arguments parameters properties required",
)
_CHAT = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """A family with its `special` tokens, and its `markup`: added tokens that are not special."""

    name: str
    parser: str
    special: tuple[str, ...] = _CHAT
    markup: tuple[str, ...] = _TAGS
    eos: str = "<|im_end|>"
    bos: str | None = None
    stop_tokens: tuple[str, ...] = ()
    """Tokens in generation_config.json besides `eos`."""
    several_calls: bool = True
    strips_reasoning: bool = False
    """The template drops earlier reasoning."""

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


_LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
)  # fmt: skip
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
        Family("qwen3", "hermes", strips_reasoning=True),
        Family("qwq", "hermes", strips_reasoning=True),
        Family("qwen3_coder", "qwen3_coder"),
        Family("llama3", "llama3", _LLAMA, (), "<|eot_id|>", "<|begin_of_text|>", several_calls=False),
        Family("mistral", "mistral", _MISTRAL, (), "</s>", "<s>"),
        Family("deepseek", "deepseek_v3", _DEEPSEEK, (), _DEEPSEEK[1], _DEEPSEEK[0]),
        Family(
            "glm",
            "glm",
            _GLM,
            (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "<|endoftext|>",
            stop_tokens=("<|user|>", "<|observation|>"),
        ),
        Family("harmony", "harmony", _HARMONY, (), "<|return|>", stop_tokens=("<|call|>",), several_calls=False),
        Family("kimi", "kimi", _KIMI, ()),
    )
}
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_FAMILIES = {
    family.name: family
    for family in (
        Family("seeing", "hermes", (*_CHAT, *_VISION)),
        Family("broken_blinding", "hermes", (*_CHAT, *_VISION)),
        Family("stock_seeing", "", (*_CHAT, *_VISION)),
    )
}
"""Vision-language models; the second template drops images of tools, and the third one has no tools."""
BROKEN_FAMILIES = {
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
def _train_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return str(tokenizer.to_str())


def make_base_tokenizer() -> Tokenizer:
    """A tokenizer without control tokens."""
    return Tokenizer.from_str(_train_tokenizer())


def make_tokenizer(
    family: Family, template: str | None = None, *, normalizing: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer; `normalizing` maps full-width letters to plain ones, even in control tokens."""
    tokenizer = make_base_tokenizer()
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


def make_sentencepiece_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A tokenizer that writes a space at the start of a text, like SentencePiece."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*_TRAINING_TEXT, "".join(map(chr, range(32, 127)))], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos, chat_template=family.template
    )


def save_tokenizer_folder(family: Family, folder: Path, template: str | None = None) -> Path:
    """Writes a model's folder without weights."""
    tokenizer = make_tokenizer(family, template)
    tokenizer.save_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (family.eos, *family.stop_tokens)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
