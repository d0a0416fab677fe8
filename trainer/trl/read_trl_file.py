"""Reads the arguments of a GRPO run from a script with `GRPOConfig(...)`, or a YAML file for `trl grpo --config`.

A script is read, never run: arguments whose values are not written out are reported, not guessed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.config.reader import read_text, read_with_lines
from gateway.errors import ConfigError, ConfigErrors
from trainer.trl import argument_values as values
from trainer.trl.table import TRL_TABLE
from trainer.verl.key_rule import Effect, Rule
from trainer.verl.read_config import Keys, PlacedValue
from trainer.verl.translate import Translation, translate

CONFIG, TRAINER, LORA = "GRPOConfig", "GRPOTrainer", "LoraConfig"
DEFAULT_STEPS = 100
"""Steps of a run whose file says how many epochs it has: the length of the data is not known here."""
LORA_KEYS = {"r": "r", "lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules"}
COMMAND_RULES = (
    Rule(["model_name_or_path"], "model", Effect.SAME, "a folder as `save_pretrained` writes it, or a name on the hub"),
    Rule(["dataset_name"], "data", Effect.SAME, "a data set's name, or a file of rows"),
    Rule(["dataset_train_split", "dataset_test_split", "dataset_streaming", "attn_implementation", "use_peft",
          "load_in_4bit", "load_in_8bit", "lora_dropout", "lora_task_type"],
         "", Effect.IGNORED, "it does not change what is trained here"),
    Rule(["torch_dtype", "dtype"], "update.dtype", Effect.CHANGED,
         "that of matrix products; weights and optimizer stay float32",
         convert=lambda value, _: value if value in values.DTYPES else None),
    Rule(["dataset_config"], "", Effect.CHANGED, "write it into `data`, as `name:config`"),
    Rule(["reward_funcs", "reward_model_name_or_path"], "", Effect.CHANGED,
         "name your function in `reward.components`: `rewards.py:name`"),
)  # fmt: skip
"""Keys of `trl grpo --config` besides those of `GRPOConfig`."""


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
    known = {name for rule in TRL_TABLE.rules for name in rule.names}
    rules = tuple(rule for rule in COMMAND_RULES if not known & {*rule.names})
    return translate(keys, replace(TRL_TABLE, rules=(*TRL_TABLE.rules, *rules)))


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
    for call, name in _find_calls(tree):
        for argument in call.keywords:
            place = f"{file}:{argument.value.lineno}"
            if argument.arg is None or (name == TRAINER and argument.arg != "model"):
                continue
            key = "model_name_or_path" if name == TRAINER else argument.arg
            try:
                keys[key] = PlacedValue(ast.literal_eval(argument.value), place)
            except ValueError:
                if name == CONFIG:
                    text = ast.unparse(argument.value)[:80]
                    errors.append(ConfigError(f"is computed: {text}", file=place, field=key, remedy="write the value"))
    if errors:
        raise ConfigErrors(errors)
    return keys


def _find_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """The calls whose arguments are settings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name: Any = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in (CONFIG, TRAINER, LORA):
                yield node, name
