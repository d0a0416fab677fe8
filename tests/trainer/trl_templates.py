"""The chat templates of TRL's wheel, tokenizers for them, and what is expected of each, as docs/templates.md says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.trainer.conversations import TOOL
from tests.trainer.tokenizer_families import make_base_tokenizer
from trainer.template import Settings, Template
from trainer.template.chat_template import Tool

FOLDER = Path(__file__).parents[2] / ".peers" / "trl" / "chat_templates"
"""`make peers` puts them there."""
_TOKENS = re.compile(
    r"<\|[\w:\"]*\|?>|<\w*\|>|<\uff5c[^\uff5c]*\uff5c>|\[/?INST\]|\[gMASK\]|<sop>|</s>|<image>"
    r"|<(?:start|end)_of_\w+>|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
"""Everything in a template's source that is a token of the family's tokenizer."""
_MARKUP = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
"""Tokens that are not special."""
RUNS, ONE_CALL, NO_CALLS, NO_TOOLS = "runs", "runs, one call a turn", "no calls", "no tools"
REFUSALS = {
    NO_CALLS: "the chat template does not write the assistant's calls",
    NO_TOOLS: "the template does not write the tools that it is given",
}


@dataclass(frozen=True)
class TrlFamily:
    """Templates of one family of models, with what happens to a job with tools."""

    models: str
    files: tuple[str, ...]
    outcome: str
    parser: str = ""
    eos: str = "<|im_end|>"
    stop_tokens: tuple[str, ...] = ()
    """Tokens in generation_config.json besides `eos`."""
    takes_system: bool = True


def _with_training(*names: str) -> tuple[str, ...]:
    """The templates, each with the variant that TRL made of it for training."""
    return tuple(file for name in names for file in (name, f"{name}_training"))


_GEMMA4 = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5")
_QWEN35 = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
_NEMOTRON = ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning")
_LFM25 = ("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
FAMILIES = (
    TrlFamily("Qwen2.5", _with_training("qwen2_5"), RUNS, "hermes"),
    TrlFamily("Qwen3, Qwen3-2507", _with_training("qwen3", "qwen3_instruct_2507"), RUNS, "hermes"),
    TrlFamily("Qwen3-VL", _with_training("qwen3_vl"), RUNS, "hermes"),
    TrlFamily("Qwen3.5, 3.6, 3.8", _with_training(*_QWEN35), RUNS, "qwen3_coder"),
    TrlFamily("Qwen2-VL, Qwen2.5-VL", _with_training("qwen2_5_vl"), NO_CALLS),
    TrlFamily("Nemotron 3, 3.5", _with_training(*_NEMOTRON), RUNS, "qwen3_coder"),
    TrlFamily("GLM-4 MoE", _with_training("glm4moe"), RUNS, "glm", "<|endoftext|>", ("<|user|>", "<|observation|>")),
    TrlFamily(
        "Gemma 4, DiffusionGemma",
        (*_GEMMA4, *_with_training("diffusion_gemma")),
        RUNS,
        "gemma4",
        "<turn|>",
        ("<|tool_response>",),
    ),
    TrlFamily("LFM2 (later revision)", _with_training("lfm2_v2"), RUNS, "lfm2"),
    TrlFamily("LFM2.5, LFM2.5-VL", _LFM25, RUNS, "lfm2"),
    TrlFamily("LFM2 (first revision)", _with_training("lfm2"), NO_CALLS),
    TrlFamily("Muse Glimmer", _with_training("muse_glimmer"), RUNS, "muse", "<|eot|>"),
    TrlFamily("gpt-oss", _with_training("gptoss"), ONE_CALL, "harmony", "<|return|>", ("<|call|>",)),
    TrlFamily("Llama 3.1, 3.2", ("llama3_1", "llama3_2"), ONE_CALL, "llama3", "<|eot_id|>", ("<|eom_id|>",)),
    TrlFamily("Llama 3", _with_training("llama3"), NO_CALLS, "", "<|eot_id|>"),
    TrlFamily("DeepSeek-V3", _with_training("deepseekv3"), NO_TOOLS, "deepseek_v3", _DEEPSEEK_END),
    TrlFamily("DeepSeek-R1-Distill", _with_training("deepseek_r1_distill"), NO_CALLS, "", _DEEPSEEK_END),
    TrlFamily("Gemma, Gemma 2", _with_training("gemma"), NO_CALLS, "", "<end_of_turn>", takes_system=False),
    TrlFamily("Gemma 3", _with_training("gemma3"), NO_CALLS, "", "<end_of_turn>"),
    TrlFamily("Phi-3, Phi-3.5", _with_training("phi3", "phi3_5"), NO_CALLS, "", "<|endoftext|>", ("<|end|>",)),
    TrlFamily("Aya Expanse, Tiny Aya", _with_training("cohere", "cohere2"), NO_CALLS, "", "<|END_OF_TURN_TOKEN|>"),
    TrlFamily("Idefics3, SmolVLM", _with_training("idefics3", "smolvlm"), NO_CALLS, "", "<end_of_utterance>"),
    TrlFamily("LLaVA-NeXT", _with_training("llava_next"), NO_CALLS, "", "</s>"),
)
BY_FILE = {file: family for family in FAMILIES for file in family.files}


@cache
def make_trl_tokenizer(file: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the tokens that the template uses."""
    source = (FOLDER / f"{file}.jinja").read_text(encoding="utf-8")
    family = BY_FILE[file]
    tokens = {*_TOKENS.findall(source), family.eos, *family.stop_tokens, "<bos>"}
    tokenizer = make_base_tokenizer()
    for special in (True, False):
        added = sorted(token for token in tokens if bool(_MARKUP.fullmatch(token)) is not special)
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token="<bos>", chat_template=source
    )


def load_trl_template(file: str, settings: Settings | None = None, tools: tuple[Tool, ...] = (TOOL,)) -> Template:
    """The template with its parser and the stop ids of the family's generation_config.json."""
    template = Template.load(make_trl_tokenizer(file), settings=settings, tools=tools)
    names = (BY_FILE[file].eos, *BY_FILE[file].stop_tokens)
    ids = [template.tokenizer.control_ids[token] for token in names]
    return Template(template.chat, template.parser, ids, template.settings)
