"""Reads a configuration of verl from YAML, a launch script or a command line, as dotted keys with values and places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.config.entries import display_path
from gateway.config.reader import read_with_lines
from gateway.errors import ConfigError
from mtrl_plugins.scripts.key_table import COMMAND_LINE, Keys, PlacedValue
from mtrl_plugins.scripts.launches import Word
from mtrl_plugins.scripts.script_reader import NO_TRAINING, ScriptReader
from mtrl_plugins.verl.hydra_words import (
    CONFIG_NAME,
    CONFIG_PATH,
    is_override,
    read_value,
    read_words,
    require_override,
)

TRAIN_MODULE = re.compile(r"(?:.*[./])?main_(ppo|dapo)(\.py)?")
"""verl's training programs."""
RECIPE = "recipe"
"""Stands for a key: the package that the training program is in, if it is one of verl's recipes."""
_RECIPE_MODULE = re.compile(r"recipe[./](\w+)[./]main_ppo(?:\.py)?")
VERL_DEFAULT_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own complete configurations; their values are the defaults in `table.py`."""
HYDRA_ONLY_KEYS = ("hydra", "defaults", "_target_")


def read_keys(source: Path | None, words: Sequence[str], reader: ScriptReader | None = None) -> Keys:
    """The keys of a file, overridden by `key=value` words of the command line."""
    keys = _read_file(source, reader or ScriptReader()) if source is not None else {}
    return _apply_overrides(keys, [Word(word, COMMAND_LINE) for word in words])


def is_training(words: Sequence[str]) -> bool:
    """True for a command that starts one of verl's training programs."""
    return any(TRAIN_MODULE.fullmatch(word) for word in words)


def read_command(words: Sequence[str], reader: ScriptReader | None = None) -> Keys:
    """The keys of a complete launch command, or of a file followed by overrides."""
    if is_training(words):
        return _read_launch_command([Word(word, COMMAND_LINE) for word in words])
    files = [word for word in words if not is_override(word)]
    if len(files) > 1:
        problem = f"{files[1]!r:.80} is not `key=value`, and {files[0]!r:.80} is the file"
        raise ConfigError(problem, file=COMMAND_LINE, remedy="name one file, and keys as `data.train_batch_size=256`")
    overrides = [word for word in words if is_override(word)]
    return read_keys(Path(files[0]) if files else None, overrides, reader)


def _read_file(file: Path, reader: ScriptReader) -> Keys:
    if file.suffix in (".yaml", ".yml"):
        return _read_yaml(file, ())
    return _read_launch_command(reader.read(file, is_training, NO_TRAINING).words)


def _read_launch_command(command: Sequence[Word]) -> Keys:
    """`--config-path` and `--config-name` name a file; all other words are overrides."""
    start = next(index for index, word in enumerate(command) if TRAIN_MODULE.fullmatch(word.text))
    options, overrides = read_words(command[start + 1 :])
    name = options.get(CONFIG_NAME)
    stem = name.text.removesuffix(".yaml") if name is not None else VERL_DEFAULT_CONFIGS[0]
    keys: Keys = {}
    if options:
        file = Path(options[CONFIG_PATH].text if CONFIG_PATH in options else "").expanduser() / f"{stem}.yaml"
        if file.is_file():
            keys = _read_yaml(file, ())
        elif stem not in VERL_DEFAULT_CONFIGS:
            place = name.place if name is not None else COMMAND_LINE
            remedy = "copy it from verl's examples, or name its folder with --config-path"
            raise ConfigError(f"there is no file {file}", file=place, field=CONFIG_NAME, remedy=remedy)
    if match := _RECIPE_MODULE.fullmatch(command[start].text):
        keys[RECIPE] = PlacedValue(match[1], command[start].place)
    return _apply_overrides(keys, overrides)


def _apply_overrides(keys: Keys, words: Iterable[Word]) -> Keys:
    changed = dict(keys)
    for word in words:
        match = require_override(word)
        key = match["key"]
        if match["prefix"] == "~":
            changed = {old: placed for old, placed in changed.items() if not f"{old}.".startswith(f"{key}.")}
            continue
        value = read_value(match["value"], word.place)
        changed.update(_flatten(value, key, {}, word.place))
    return changed


def _read_yaml(file: Path, included_by: tuple[Path, ...]) -> Keys:
    """The keys of a YAML file, over those of the files in its `defaults` list that are in the same folder."""
    tree, lines = read_with_lines(file)
    if not isinstance(tree, dict):
        remedy = "name a YAML configuration of verl's trainer"
        raise ConfigError("is not a mapping", file=display_path(file), remedy=remedy)
    keys: Keys = {}
    for base in _find_default_files(tree.get("defaults"), file, lines):
        if base in (*included_by, file):
            problem = f"its `defaults` include {base}, which includes it"
            raise ConfigError(problem, file=display_path(file), remedy="remove that line")
        keys.update(_read_yaml(base, (*included_by, file)))
    places = {".".join(map(str, loc)): f"{display_path(file)}:{line}" for loc, line in lines.items()}
    for name, inner in tree.items():
        if name not in HYDRA_ONLY_KEYS:
            keys.update(_flatten(inner, name, places, str(display_path(file))))
    return keys


def _find_default_files(defaults: Any, file: Path, lines: Mapping[Any, int]) -> Iterator[Path]:
    for entry in defaults if isinstance(defaults, list) else ():
        name = entry if isinstance(entry, str) else next(iter(entry), "")
        sibling = file.parent / f"{name}.yaml"
        if isinstance(entry, str) and sibling.is_file():
            yield sibling
        elif name not in (*VERL_DEFAULT_CONFIGS, "_self_"):
            place = f"{display_path(file)}:{lines.get(('defaults',), 1)}"
            remedy = "copy its content into this file"
            raise ConfigError(f"{name!r} is not in the file's folder", file=place, field="defaults", remedy=remedy)


def _flatten(tree: Any, key: str, places: Mapping[str, str], place: str) -> Iterator[tuple[str, PlacedValue]]:
    """The leaves of a tree under dotted keys; an empty mapping is a leaf."""
    place = places.get(key, place)
    if not isinstance(tree, dict) or not tree:
        yield key, PlacedValue(tree, place)
        return
    for name, inner in tree.items():
        if name not in HYDRA_ONLY_KEYS:
            yield from _flatten(inner, f"{key}.{name}", places, place)
