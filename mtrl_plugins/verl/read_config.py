"""Reads a configuration of verl from YAML, a launch script or a command line, as dotted keys with values and places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.config.entries import display_path
from gateway.config.reader import parse_value, read_with_lines
from gateway.errors import ConfigError
from mtrl_plugins.scripts.key_table import COMMAND_LINE, Keys, PlacedValue
from mtrl_plugins.scripts.launches import Word
from mtrl_plugins.scripts.script_reader import NO_TRAINING, ScriptReader

TRAIN_MODULE = re.compile(r"(?:.*[./])?main_(ppo|dapo)(\.py)?")
"""verl's training programs."""
RECIPE = "recipe"
"""Stands for a key: the package that the training program is in, if it is one of verl's recipes."""
_RECIPE_MODULE = re.compile(r"recipe[./](\w+)[./]main_ppo(?:\.py)?")
VERL_DEFAULT_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own complete configurations; their values are the defaults in `table.py`."""
OVERRIDE = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<key>[A-Za-z_][\w.@/-]*)(=(?P<value>.*))?", re.DOTALL)
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
    file = next((Path(word) for word in words if not _is_override(word)), None)
    return read_keys(file, [word for word in words if _is_override(word)], reader)


def _is_override(word: str) -> bool:
    match = OVERRIDE.fullmatch(word)
    return match is not None and (match["value"] is not None or match["prefix"] == "~")


def _read_file(file: Path, reader: ScriptReader) -> Keys:
    if file.suffix in (".yaml", ".yml"):
        return _read_yaml(file, ())
    return _read_launch_command(reader.read(file, is_training, NO_TRAINING).words)


def _read_launch_command(command: Sequence[Word]) -> Keys:
    """`--config-path` and `--config-name` name a file; all other words with `=` are overrides."""
    start = next(index for index, word in enumerate(command) if TRAIN_MODULE.fullmatch(word.text))
    words = command[start + 1 :]
    options = {name: word for name in ("config-path", "config-name") if (word := _find_option(words, name))}
    config_name = options.get("config-name")
    stem = config_name.text.removesuffix(".yaml") if config_name is not None else ""
    keys: Keys = {}
    if config_name is not None and stem not in VERL_DEFAULT_CONFIGS:
        folder = Path(options["config-path"].text if "config-path" in options else "").expanduser()
        file = folder / f"{stem}.yaml"
        if not file.is_file():
            remedy = "copy it from verl's examples, or name its folder with --config-path"
            raise ConfigError(f"there is no file {file}", file=config_name.place, field="--config-name", remedy=remedy)
        keys = _read_yaml(file, ())
    if match := _RECIPE_MODULE.fullmatch(command[start].text):
        keys[RECIPE] = PlacedValue(match[1], command[start].place)
    return _apply_overrides(keys, [word for word in words if _is_override(word.text) and not word.text.startswith("-")])


def _find_option(words: Sequence[Word], name: str) -> Word | None:
    for index, word in enumerate(words):
        if word.text == f"--{name}" and index + 1 < len(words):
            return words[index + 1]
        if word.text.startswith(f"--{name}="):
            return Word(word.text.partition("=")[2], word.place)
    return None


def _apply_overrides(keys: Keys, words: Iterable[Word]) -> Keys:
    changed = dict(keys)
    for word in words:
        match = OVERRIDE.fullmatch(word.text)
        if match is None or (match["value"] is None and match["prefix"] != "~"):
            problem = f"{word.text!r} is not `key=value`"
            raise ConfigError(problem, file=word.place, remedy="write it as `data.train_batch_size=256`")
        key = match["key"]
        if match["prefix"] == "~":
            changed = {old: placed for old, placed in changed.items() if not f"{old}.".startswith(f"{key}.")}
            continue
        value = parse_value(match["value"], Path(word.place)) if match["value"] else ""
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
