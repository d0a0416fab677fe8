"""Chooses the parser of tool calls by the model's chat template, or loads one by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.config.diagnostics import closest_match
from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from gateway.plugins import load_name
from gateway.types import EMPTY
from trainer.parse.base import Parser

PARSERS: Mapping[str, str] = {
    "cohere": "json_list:Cohere",
    "deepseek": "deepseek:Deepseek",
    "deepseek_v3": "deepseek:DeepseekV3",
    "gemma4": "gemma4:Gemma4",
    "glm": "glm:Glm",
    "gpt-oss": "harmony:Harmony",
    "harmony": "harmony:Harmony",
    "hermes": "hermes:Hermes",
    "kimi": "kimi:Kimi",
    "lfm2": "lfm2:Lfm2",
    "llama3": "llama3:Llama3",
    "llama3_json": "llama3:Llama3",
    "minimax": "invoke:MiniMax",
    "mistral": "mistral:Mistral",
    "mistral_args": "mistral:MistralArgs",
    "muse": "invoke:Muse",
    "phi4": "json_list:Phi4",
    "plain_text": "plain:PlainText",
    "qwen": "hermes:Hermes",
    "qwen3_coder": "qwen3_coder:Qwen3Coder",
}
"""Parsers as `module:Class` by name, including the names of other trainers and servers; imported when they are used."""
TEMPLATE_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<atem:function_calls>", "<|message|>"), "invoke:Muse"),
    (("<|channel|>", "<|message|>"), "harmony:Harmony"),
    (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), "kimi:Kimi"),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"), "deepseek:DeepseekV3"),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>",), "deepseek:Deepseek"),
    (("<|tool_call>", "<tool_call|>"), "gemma4:Gemma4"),
    (("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2:Lfm2"),
    (("<|START_ACTION|>",), "json_list:Cohere"),
    (("<|START_RESPONSE|>",), "json_list:Cohere"),
    (("<minimax:tool_call>",), "invoke:MiniMax"),
    (("<|tool_call|>", "<|/tool_call|>"), "json_list:Phi4"),
    (("<function=", "<parameter="), "qwen3_coder:Qwen3Coder"),
    (("<tool_call>", "<arg_key>"), "glm:Glm"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral:MistralArgs"),
    (("[TOOL_CALLS]",), "mistral:Mistral"),
    (("<tool_call>",), "hermes:Hermes"),
    (("<|start_header_id|>", "parameters"), "llama3:Llama3"),
)
"""The first parser is chosen whose marks all occur in the template."""
_FIELD = "parser"


def choose_parser(
    chat_template: str, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False
) -> Parser:
    """The parser for a chat template."""
    for marks, family in TEMPLATE_MARKS:
        if all(mark in chat_template for mark in marks):
            parser: Parser = _load_class(family)(schemas, thinking_open=thinking_open)
            return parser
    raise ConfigError("the chat template contains no known format of tool calls", field=_FIELD, remedy=_remedy(""))


def find_parser_class(name: str) -> Any:
    """The class of a parser that comes with the package."""
    return _load_class(PARSERS[name])


def _load_class(target: str) -> Any:
    return load_name(f"trainer.parse.{target}")


def load_parser(name: str, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False) -> Parser:
    """A parser by name, or a user's own by `module:Class`, which takes the arguments of `CallParser`."""
    if name not in PARSERS and ":" not in name:
        raise ConfigError(f"there is no parser {name!r}", field=_FIELD, remedy=_remedy(name))
    parser_class = find_parser_class(name) if name in PARSERS else load_object(name, field=_FIELD)
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
