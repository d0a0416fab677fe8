"""The default demo's model: a tokenizer trained on its tasks, and a Qwen3 of about 170 000 weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gateway.feedback.gsm8k import RIGHT_REPLY, WRONG_REPLY
from gateway.types import ToolSpec
from mtrl_plugins.demo.demos import Demo
from mtrl_plugins.demo.facts.facts_tasks import CITIES, KINDS, PEOPLE, TOOLS, draw_problem, draw_problems
from mtrl_plugins.demo.problem import Problem
from mtrl_plugins.demo.warm_start import PLAIN_RECIPE, DemonstrationWriter, Recipe, WarmStartSetup
from trainer.ledger import Message
from trainer.template import Template
from trainer.template.tokenizer import strip_fences

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")
WORD_PATTERN = r"(?:system|user|assistant|tool)\n|\d|[A-Z][a-z]+"
"""Pieces that are tokenized alone: no token crosses from the prompt into the policy's turn, and digits and names are
copied one by one. Everything between them may become one token, spaces included."""
VOCABULARY_SIZE = 640
MODEL_SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
"""The configuration of a tiny model."""
TRAINING_CONVERSATIONS = 400


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the demo's tokenizer."""
    return train_tokenizer(SPECIAL_TOKENS, CHAT_TEMPLATE, _training_texts)


def train_tokenizer(
    special_tokens: Sequence[str],
    chat_template: Path,
    texts: Callable[[PreTrainedTokenizerFast], Iterator[str]],
    pattern: str = WORD_PATTERN,
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer in about a second; `texts` renders a demo's conversations with the untrained tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    added_tokens = [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    tokenizer.add_special_tokens(added_tokens)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=added_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(_wrap_tokenizer(tokenizer, chat_template)), trainer)
    return _wrap_tokenizer(tokenizer, chat_template)


def build_network(vocabulary_size: int, end_token: int, seed: int = 0) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **MODEL_SHAPE,
        vocab_size=vocabulary_size,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        eos_token_id=end_token,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def build_model(folder: Path, seed: int = 0) -> Path:
    """Writes the model with random weights, as `save_pretrained` does."""
    return save_model(folder, build_tokenizer(), seed)


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> Path:
    """Writes a model of these tokens, with random weights."""
    tokenizer.save_pretrained(folder)
    build_network(len(tokenizer), tokenizer.get_vocab()[SPECIAL_TOKENS[1]], seed).save_pretrained(folder)
    return folder


def _wrap_tokenizer(tokenizer: Tokenizer, chat_template: Path) -> PreTrainedTokenizerFast:
    template = chat_template.read_text(encoding="utf-8").removesuffix("\n")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[1], pad_token=SPECIAL_TOKENS[2], chat_template=template
    )


def _training_texts(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    replies = [{"role": "user", "content": reply} for reply in (WRONG_REPLY, RIGHT_REPLY)]
    yield from render_problems(tokenizer, islice(draw_problems(seed=0), TRAINING_CONVERSATIONS), TOOLS, replies)
    yield from (f"{name} {name} {name} {name}" for name in (*PEOPLE, *CITIES))


def render_problems(
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterable[Problem],
    tools: Sequence[ToolSpec],
    replies: Sequence[Message] = (),
) -> Iterator[str]:
    """The chats of solved problems, with `replies` at their ends, as texts."""
    chat = Template.load(tokenizer).chat
    for problem in problems:
        messages = list(problem.task.messages)
        for turn, call in zip(problem.turns, problem.calls, strict=False):
            messages += [turn, {"role": "tool", "content": call.result}]
        yield strip_fences(chat.render([*messages, problem.turns[-1], *replies], tools, add_generation_prompt=True))


def build_warm_start(folder: Path) -> WarmStartSetup:
    """Sets up the warm start of the model in a folder."""
    writer = DemonstrationWriter(Template.load(folder), TOOLS)
    return WarmStartSetup(writer, lambda seed, kinds: draw_problems(seed, kinds=kinds))


DEMO = Demo(
    tuple(KINDS),
    draw_problem,
    {"habit": Recipe(), "plain": PLAIN_RECIPE},
    build_model,
    build_warm_start,
    tools=Path(__file__).with_name("tools"),
)
