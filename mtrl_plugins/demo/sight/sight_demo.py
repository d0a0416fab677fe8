"""The vision demo's model: a tokenizer trained on its tasks, and a Qwen3-VL of about 250 000 weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from mtrl_plugins.demo.demos import Demo
from mtrl_plugins.demo.facts import facts_demo
from mtrl_plugins.demo.facts.facts_tasks import CITIES, PEOPLE
from mtrl_plugins.demo.problem import Problem
from mtrl_plugins.demo.sight.house import COLOURS, SIDE
from mtrl_plugins.demo.sight.sight_tasks import KIND, TOOLS, draw_problem
from mtrl_plugins.demo.warm_start import DemonstrationWriter, Recipe, WarmStartSetup
from trainer.template import Template
from trainer.template.tokenizer import strip_fences

VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
SPECIAL_TOKENS = (*facts_demo.SPECIAL_TOKENS, *VISION_TOKENS.values())
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")
WORD_PATTERN = rf"{facts_demo.WORD_PATTERN}|#### "
"""`#### ` is a token of its own: otherwise a guess would be spread over one token for each answer."""
PATCH = 4
TRAINING_CONVERSATIONS = 200
VISION_CONFIG = {
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
TEXT_CONFIG = {
    **facts_demo.MODEL_SHAPE,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "pad_token_id": None,
}
PROCESSOR_CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 1,
    "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
}
"""Resizes every image to the size of the demo's houses."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the demo's tokenizer."""
    return facts_demo.train_tokenizer(SPECIAL_TOKENS, CHAT_TEMPLATE, _training_texts, WORD_PATTERN)


def build_model(folder: Path, seed: int = 0) -> Path:
    """Writes the model with random weights, as `save_pretrained` does."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    torch.manual_seed(seed)
    vision_ids: dict[str, Any] = {name: ids[token] for name, token in VISION_TOKENS.items()}
    text = {**TEXT_CONFIG, "vocab_size": len(tokenizer), "eos_token_id": ids[SPECIAL_TOKENS[1]]}
    config = Qwen3VLConfig(text_config=text, vision_config=VISION_CONFIG, tie_word_embeddings=True, **vision_ids)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR_CONFIG, indent=1), encoding="utf-8")
    return folder


def _training_texts(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    chat = Template.load(tokenizer).chat
    for number in range(TRAINING_CONVERSATIONS):
        problem = draw_problem(0, number, KIND)
        messages = list(problem.task.messages)
        for turn in problem.turns[:-1]:
            messages += [turn, {"role": "tool", "content": [{"type": "image"}]}]
        yield strip_fences(chat.render([*messages, problem.turns[-1]], TOOLS, add_generation_prompt=True))
    yield from (f"{name} {name} {name} {name}" for name in (*PEOPLE, *CITIES))
    yield from (f"#### {colour}" for colour in COLOURS)


HABIT_RECIPE = Recipe(demo="sight", skill_steps=800, habit_steps=80, kinds=(KIND,))


def build_warm_start(folder: Path) -> WarmStartSetup:
    """Sets up the warm start of the model in a folder."""
    return WarmStartSetup(DemonstrationWriter(Template.load(folder), TOOLS), _draw_problems)


def _draw_problems(seed: str, kinds: tuple[str, ...]) -> Iterator[Problem]:
    return (draw_problem(seed, number, kinds[number % len(kinds)]) for number in count())


DEMO = Demo((KIND,), draw_problem, {"habit": HABIT_RECIPE}, build_model, build_warm_start)
