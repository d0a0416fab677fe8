"""A model's chat template shows how its family writes calls; where it does not, a person says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.config.find import find
from gateway.config.mistakes import nearest
from gateway.errors import ConfigError
from gateway.types import EMPTY

from .base import Parser
from .deepseek import Deepseek, DeepseekV3
from .family import Family
from .glm import Glm
from .harmony import Harmony
from .hermes import Hermes
from .kimi import Kimi
from .llama3 import Llama3
from .mistral import Mistral, MistralArgs
from .qwen3_coder import Qwen3Coder

NAMES: Mapping[str, type[Family]] = {
    "deepseek": Deepseek,
    "deepseek_v3": DeepseekV3,
    "glm": Glm,
    "gpt-oss": Harmony,
    "harmony": Harmony,
    "hermes": Hermes,
    "kimi": Kimi,
    "llama3": Llama3,
    "llama3_json": Llama3,
    "mistral": Mistral,
    "mistral_args": MistralArgs,
    "qwen": Hermes,
    "qwen3_coder": Qwen3Coder,
}
"""A family may have several names: those that other trainers and servers give it are taken, too."""
MARKS: tuple[tuple[tuple[str, ...], type[Family]], ...] = (
    (("<|channel|>", "<|message|>"), Harmony),
    (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), Kimi),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"), DeepseekV3),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>",), Deepseek),
    (("<function=", "<parameter="), Qwen3Coder),
    (("<tool_call>", "<arg_key>"), Glm),
    (("[TOOL_CALLS]", "[ARGS]"), MistralArgs),
    (("[TOOL_CALLS]",), Mistral),
    (("<tool_call>",), Hermes),
    (("<|start_header_id|>", "parameters"), Llama3),
)
"""The first family is chosen all of whose marks stand in the template."""
_FIELD = "parser"


def choose(
    chat_template: str, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False
) -> Parser:
    """The parser of the family that the template belongs to."""
    for marks, family in MARKS:
        if all(mark in chat_template for mark in marks):
            return family(schemas, thinking_open=thinking_open)
    raise ConfigError("the chat template shows no known way of writing calls", field=_FIELD, remedy=_remedy(""))


def named(name: str, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False) -> Parser:
    """The parser of a family by its name, or a user's own by `module:Class`, made as a `Family` is."""
    if name not in NAMES and ":" not in name:
        raise ConfigError(f"there is no parser {name!r}", field=_FIELD, remedy=_remedy(name))
    made = NAMES[name] if name in NAMES else find(name, field=_FIELD)
    try:
        parser: Parser = made(schemas, thinking_open=thinking_open)
    except TypeError as error:
        remedy = "let its class derive from trainer.parse.family:Family, or take the same arguments"
        raise ConfigError(f"{name!r} cannot be made: {error}", field=_FIELD, remedy=remedy) from error
    if not (callable(getattr(parser, "parse", None)) and isinstance(getattr(parser, "name", None), str)):
        raise ConfigError(f"{name!r} is no parser", field=_FIELD, remedy="give it a `name` and a method `parse`")
    return parser


def _remedy(name: str) -> str:
    near = nearest(name, NAMES)
    meant = f"did you mean {near!r}? " if near else ""
    return f"{meant}choose one of {', '.join(NAMES)}, or name your own as `module:Class`"
