"""The default demo's model: a tokenizer of the tasks' own words, and a Qwen3 of a sixth of a million weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gateway.feedback.gsm8k import RIGHT, WRONG
from trainer.demo.facts.task import CITIES, PEOPLE, TOOLS, problems
from trainer.template import Template
from trainer.template.tokens import plain

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHAT = Path(__file__).with_name("chat.jinja")
PIECES = r"(?:system|user|assistant|tool)\n|\d|[A-Z][a-z]+"
"""Each stands alone: no token crosses from the prompt into the policy's turn, and digits and names are copied one by
one. Everything between them may become one token, spaces included."""
VOCABULARY = 640
SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
"""Of a model that is as small as can be, whatever it reads and writes."""
LINES = 400


def tokenizer() -> PreTrainedTokenizerFast:
    return spelled(SPECIAL, CHAT, _lines)


def spelled(
    special: Sequence[str], chat: Path, lines: Callable[[PreTrainedTokenizerFast], Iterator[str]], pieces: str = PIECES
) -> PreTrainedTokenizerFast:
    """Trained on conversations of a demo, in about a second; `lines` writes them in words that are not merged yet."""
    made = Tokenizer(models.BPE())
    alone = pre_tokenizers.Split(Regex(pieces), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([alone, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False) for token in special]
    made.add_special_tokens(control)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(lines(_spoken(made, chat)), trainer)
    return _spoken(made, chat)


def network(vocabulary: int, stop: int, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        **SHAPE,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        eos_token_id=stop,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def build(folder: Path, seed: int = 0) -> Path:
    """A folder as `save_pretrained` writes it; the weights are random still."""
    made = tokenizer()
    made.save_pretrained(folder)
    network(len(made), made.get_vocab()[SPECIAL[1]], seed).save_pretrained(folder)
    return folder


def _spoken(made: Tokenizer, chat: Path) -> PreTrainedTokenizerFast:
    template = chat.read_text(encoding="utf-8").removesuffix("\n")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, eos_token=SPECIAL[1], pad_token=SPECIAL[2], chat_template=template
    )


def _lines(spoken: PreTrainedTokenizerFast) -> Iterator[str]:
    chat = Template.load(spoken).chat
    for one in islice(problems(seed=0), LINES):
        rows = list(one.task.messages)
        for turn, call in zip(one.turns, one.calls, strict=False):
            rows += [turn, {"role": "tool", "content": call.answer}]
        rows += [one.turns[-1], {"role": "user", "content": WRONG}, {"role": "user", "content": RIGHT}]
        yield plain(chat.text(rows, TOOLS, prompt=True))
    yield from (f"{name} {name} {name} {name}" for name in (*PEOPLE, *CITIES))
