"""Reads the arguments of a GRPO run from a script with `GRPOConfig(...)`, or a YAML file for `trl grpo --config`.

A script is read, never run: arguments whose values are not written out are reported, not guessed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.config.reader import read_file, read_text, read_with_lines
from gateway.errors import ConfigError, ConfigErrors
from mtrl_plugins.scripts.key_table import Keys, PlacedValue, make_rules
from mtrl_plugins.scripts.translate import Translation, translate
from mtrl_plugins.trl import conversions

CONFIG, TRAINER, LORA = "GRPOConfig", "GRPOTrainer", "LoraConfig"
POSITIONS = {
    CONFIG: ("output_dir",),
    TRAINER: ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    LORA: (),
}
"""The names of arguments that calls may give by position."""
IN_OTHER_CALLS = ("args", "peft_config")
"""Arguments of the trainer whose own calls are read."""
UNPACKED = "**"
COMPUTED = object()
SHOWN_CHARACTERS = 80
DEFAULT_STEPS = 100
"""Steps of a run whose file says how many epochs it has: the length of the data is not known here."""
LORA_KEYS = {"r": "r", "lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules"}


def translate_trl_file(file: Path) -> Translation:
    """The settings for a file; raises ConfigErrors with all arguments that are unknown or not supported."""
    keys = _read_script(file) if file.suffix == ".py" else _read_yaml(file)
    if not keys:
        remedy = "name a script with `GRPOConfig(...)`, or a YAML file for `trl grpo --config`"
        raise ConfigError("has no arguments of a GRPO run", file=file, remedy=remedy)
    lora = {LORA_KEYS[name]: keys.pop(name).value for name in [*keys] if name in LORA_KEYS}
    if lora or keys.get("use_peft", PlacedValue(False, "")).value is True:
        keys["peft_config"] = PlacedValue(lora, str(file))
    if "max_steps" not in keys:
        keys["max_steps"] = PlacedValue(DEFAULT_STEPS, "the length of the data is not known")
    rows: Any = read_file(conversions.TABLE_FILE)
    objects, commands = (make_rules(rows[section], vars(conversions)) for section in ("objects", "command"))
    named = {name for rule in objects for name in rule.names}
    table = (rule for rule in conversions.TRL_TABLE.rules if named.isdisjoint(rule.names))
    return translate(keys, replace(conversions.TRL_TABLE, rules=(*table, *commands, *objects)))


def _read_yaml(file: Path) -> Keys:
    content, lines = read_with_lines(file)
    if not isinstance(content, Mapping):
        raise ConfigError("is not a mapping", file=file, remedy="write arguments as `name: value`")
    return {str(name): PlacedValue(value, f"{file}:{lines.get((name,), 1)}") for name, value in content.items()}


def _read_script(file: Path) -> Keys:
    try:
        tree = ast.parse(read_text(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"is not Python ({error})", file=f"{file}{line}", remedy="correct it there") from None
    keys: Keys = {}
    errors: list[ConfigError] = []
    calls = list(_find_calls(tree))
    has_lora = any(name == LORA for _, name in calls)
    for call, name in calls:
        for key, value in _arguments_of(call, name):
            place = f"{file}:{value.lineno}"
            if name == TRAINER and key in IN_OTHER_CALLS and (key == "args" or has_lora or _literal(value) is None):
                continue
            if name == TRAINER and key == "model" and isinstance(_literal(value), str):
                key = "model_name_or_path"
            literal = _literal(value)
            if literal is COMPUTED and (name == CONFIG or key in LORA_KEYS or key in (UNPACKED, "peft_config")):
                text = ast.unparse(value)[:SHOWN_CHARACTERS]
                errors.append(ConfigError(f"is computed: {text}", file=place, field=key, remedy="write the value"))
                continue
            keys[key] = PlacedValue(None if literal is COMPUTED else literal, place)
    if errors:
        raise ConfigErrors(errors)
    return keys


def _arguments_of(call: ast.Call, name: str) -> Iterator[tuple[str, ast.expr]]:
    """The arguments of a call by their names, those given by position as well."""
    positions = (*POSITIONS[name], *(f"argument {index + 1}" for index in range(len(POSITIONS[name]), len(call.args))))
    yield from zip(positions, call.args, strict=False)
    yield from ((UNPACKED if argument.arg is None else argument.arg, argument.value) for argument in call.keywords)


def _literal(value: ast.expr) -> Any:
    """The value of an expression, or `COMPUTED` where only Python could tell."""
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return COMPUTED


def _find_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """The calls whose arguments are settings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name: Any = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in (CONFIG, TRAINER, LORA):
                yield node, name
