"""The demo's model that sees: a tokenizer of its tasks' own words, and a Qwen3-VL of a quarter of a million weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from trainer.demo.facts import model as demo
from trainer.demo.facts.task import CITIES, PEOPLE
from trainer.demo.sight.house import COLOURS, SIDE
from trainer.demo.sight.task import KIND, TOOLS, problem
from trainer.template import Template
from trainer.template.tokens import plain

SEEN = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
SPECIAL = (*demo.SPECIAL, *SEEN.values())
CHAT = Path(__file__).with_name("chat.jinja")
PIECES = rf"{demo.PIECES}|#### "
"""That it answers is one token, and what it answers another: else a guess would be spread over as many as there are."""
PATCH = 4
LINES = 200
EYES = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_position_embeddings": (SIDE // PATCH) ** 2,
    "deepstack_visual_indexes": [0, 1],
}
WORDS = {
    **demo.SHAPE,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "pad_token_id": None,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 1,
    "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
}
"""Whatever is shown to it becomes as small as its houses are."""


def tokenizer() -> PreTrainedTokenizerFast:
    return demo.spelled(SPECIAL, CHAT, _lines, PIECES)


def build(folder: Path, seed: int = 0) -> Path:
    """A folder as `save_pretrained` writes it; the weights are random still."""
    made = tokenizer()
    made.save_pretrained(folder)
    ids = made.get_vocab()
    torch.manual_seed(seed)
    told: dict[str, Any] = {name: ids[token] for name, token in SEEN.items()}
    text = {**WORDS, "vocab_size": len(made), "eos_token_id": ids[SPECIAL[1]]}
    config = Qwen3VLConfig(text_config=text, vision_config=EYES, tie_word_embeddings=True, **told)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1), encoding="utf-8")
    return folder


def _lines(spoken: PreTrainedTokenizerFast) -> Iterator[str]:
    chat = Template.load(spoken).chat
    for place in range(LINES):
        one = problem(0, place, KIND)
        rows = list(one.task.messages)
        for turn in one.turns[:-1]:
            rows += [turn, {"role": "tool", "content": [{"type": "image"}]}]
        yield plain(chat.text([*rows, one.turns[-1]], TOOLS, prompt=True))
    yield from (f"{name} {name} {name} {name}" for name in (*PEOPLE, *CITIES))
    yield from (f"#### {colour}" for colour in COLOURS)
