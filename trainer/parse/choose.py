"""Chooses the parser of tool calls by the model's chat template, or loads one by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.config.diagnostics import closest_match
from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from gateway.types import EMPTY
from trainer.parse.base import CallParser, Parser
from trainer.parse.deepseek import Deepseek, DeepseekV3
from trainer.parse.gemma4 import Gemma4
from trainer.parse.glm import Glm
from trainer.parse.harmony import Harmony
from trainer.parse.hermes import Hermes
from trainer.parse.invoke import MiniMax, Muse
from trainer.parse.json_list import Cohere, Phi4
from trainer.parse.kimi import Kimi
from trainer.parse.lfm2 import Lfm2
from trainer.parse.llama3 import Llama3
from trainer.parse.mistral import Mistral, MistralArgs
from trainer.parse.plain import PlainText
from trainer.parse.qwen3_coder import Qwen3Coder

PARSERS: Mapping[str, type[CallParser] | type[PlainText]] = {
    "cohere": Cohere,
    "deepseek": Deepseek,
    "deepseek_v3": DeepseekV3,
    "gemma4": Gemma4,
    "glm": Glm,
    "gpt-oss": Harmony,
    "harmony": Harmony,
    "hermes": Hermes,
    "kimi": Kimi,
    "lfm2": Lfm2,
    "llama3": Llama3,
    "llama3_json": Llama3,
    "minimax": MiniMax,
    "mistral": Mistral,
    "mistral_args": MistralArgs,
    "muse": Muse,
    "phi4": Phi4,
    "plain_text": PlainText,
    "qwen": Hermes,
    "qwen3_coder": Qwen3Coder,
}
"""Parsers by name, including the names of other trainers and servers."""
TEMPLATE_MARKS: tuple[tuple[tuple[str, ...], type[CallParser]], ...] = (
    (("<atem:function_calls>", "<|message|>"), Muse),
    (("<|channel|>", "<|message|>"), Harmony),
    (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), Kimi),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"), DeepseekV3),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>",), Deepseek),
    (("<|tool_call>", "<tool_call|>"), Gemma4),
    (("<|tool_call_start|>", "<|tool_call_end|>"), Lfm2),
    (("<|START_ACTION|>",), Cohere),
    (("<|START_RESPONSE|>",), Cohere),
    (("<minimax:tool_call>",), MiniMax),
    (("<|tool_call|>", "<|/tool_call|>"), Phi4),
    (("<function=", "<parameter="), Qwen3Coder),
    (("<tool_call>", "<arg_key>"), Glm),
    (("[TOOL_CALLS]", "[ARGS]"), MistralArgs),
    (("[TOOL_CALLS]",), Mistral),
    (("<tool_call>",), Hermes),
    (("<|start_header_id|>", "parameters"), Llama3),
)
"""The first parser is chosen whose marks all occur in the template."""
_FIELD = "parser"


def choose_parser(
    chat_template: str, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False
) -> Parser:
    """The parser for a chat template."""
    for marks, family in TEMPLATE_MARKS:
        if all(mark in chat_template for mark in marks):
            return family(schemas, thinking_open=thinking_open)
    raise ConfigError("the chat template contains no known format of tool calls", field=_FIELD, remedy=_remedy(""))


def load_parser(name: str, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False) -> Parser:
    """A parser by name, or a user's own by `module:Class`, which takes the arguments of `CallParser`."""
    if name not in PARSERS and ":" not in name:
        raise ConfigError(f"there is no parser {name!r}", field=_FIELD, remedy=_remedy(name))
    parser_class = PARSERS[name] if name in PARSERS else load_object(name, field=_FIELD)
    try:
        parser: Parser = parser_class(schemas, thinking_open=thinking_open)
    except TypeError as error:
        remedy = "derive its class from trainer.parse.base:CallParser, or accept the same arguments"
        raise ConfigError(f"{name!r} cannot be created: {error}", field=_FIELD, remedy=remedy) from error
    if not (callable(getattr(parser, "parse", None)) and isinstance(getattr(parser, "name", None), str)):
        raise ConfigError(f"{name!r} is not a parser", field=_FIELD, remedy="give it a `name` and a method `parse`")
    return parser


def _remedy(name: str) -> str:
    match = closest_match(name, PARSERS)
    suggestion = f"did you mean {match!r}? " if match else ""
    return f"{suggestion}choose one of {', '.join(PARSERS)}, or name your own as `module:Class`"
