"""Reads `swift rlhf --flag value ...` from scripts or a command line, as keys with values and places.

Defaults of ms-swift that depend on its release or on the model are added as if they were written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from gateway.config.entries import display_path
from gateway.config.reader import parse_value
from gateway.errors import ConfigError
from mtrl_plugins.scripts.key_table import COMMAND_LINE, Keys, PlacedValue
from mtrl_plugins.scripts.launches import Launch, Word
from mtrl_plugins.scripts.script_reader import (
    NO_TRAINING,
    SWIFT_COMMAND,
    ScriptReader,
    choose_launch,
    read_if_text,
    split_choice,
)

MEGATRON_DEFAULTS = {"global_batch_size": 16, "tuner_type": "full"}
"""Defaults of `megatron rlhf` that differ from those of `swift rlhf`."""
CHANGED_DEFAULTS = {"top_k": (50, -1), "top_p": (0.9, 1.0)}
"""Defaults before 4.0.3, and since."""
RELEASE_3_IMPORT = re.compile(r"^\s*(?:from|import)\s+swift\.(?:plugin|llm)\b", re.MULTILINE)
"""Imports of modules that release 4 does not have."""


def implicit_defaults(keys: Keys, plugins: Iterable[str]) -> Keys:
    """Values of missing flags whose default depends on the release or the model; `plugins` are the files' texts."""
    is_release_3, defaults = _is_release_3(keys, plugins), dict[str, PlacedValue]()
    for name, (before, since) in CHANGED_DEFAULTS.items():
        why = "default of release 3" if is_release_3 else f"default since 4.0.3; {before} before"
        defaults[name] = PlacedValue(before if is_release_3 else since, why)
    model = keys.get("model", keys.get("model_id_or_path"))
    if model is not None and _has_vision(Path(str(model.value)).expanduser()):
        defaults["freeze_vit"] = PlacedValue(True, "ms-swift's default")
    return {name: placed for name, placed in defaults.items() if name not in keys}


def _has_vision(model: Path) -> bool:
    try:
        return "vision_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _is_release_3(keys: Keys, plugins: Iterable[str]) -> bool:
    if "train_type" in keys or "sft_type" in keys:
        return True
    return "tuner_type" not in keys and any(RELEASE_3_IMPORT.search(text) for text in plugins)


SWIFT_PROGRAMS = ("swift", "megatron")
SWIFT_MODULE = re.compile(r"(?:.*[./])?swift[./]cli[./](?:_megatron[./])?(rlhf|rollout)(?:\.py)?")
PROCESS_VARIABLES = ("NPROC_PER_NODE", "NNODES")
"""Environment variables with the number of processes that share a batch."""
VARIABLES = (*PROCESS_VARIABLES, "MAX_PIXELS")
"""Environment variables that results depend on."""
_VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
_TYPED_VALUE = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|none|null|[\[{].*", re.DOTALL | re.IGNORECASE)
"""Values that are parsed; all others are text."""
_FLAG = re.compile(r"--([A-Za-z_][\w-]*)(?:=(.*))?", re.DOTALL)


def find_program(words: Sequence[str]) -> str | None:
    """`rlhf` or `rollout`, if a command starts one of them."""
    return next((program for *_, program in _programs(words)), None)


def _programs(words: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """The programs of ms-swift among the words: where they are written, and where their flags begin."""
    for index, (word, after) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        if Path(word).name in SWIFT_PROGRAMS and after in ("rlhf", "rollout"):
            yield index, index + 2, after
        if match := SWIFT_MODULE.fullmatch(word):
            yield index, index + 1, match[1]


def read_command(words: Sequence[str], reader: ScriptReader | None = None) -> Keys:
    """The keys of a complete command, or of scripts followed by flags that override theirs, with implicit defaults."""
    is_command = bool(SWIFT_COMMAND.search(" ".join(words)))
    placed = [Word(word, COMMAND_LINE) for word in words]
    keys = (
        _with_megatron_defaults(words, _read_flags(placed))
        if is_command
        else _read_scripts(words, reader or ScriptReader())
    )
    plugins = keys["external_plugins"].value if "external_plugins" in keys else []
    files = plugins if isinstance(plugins, list) else [plugins]
    return keys | implicit_defaults(keys, [read_if_text(Path(str(file))) for file in files])


SHARED_FLAGS = ("model", "max_turns", "multi_turn_scheduler", "gym_env", "use_gym_env", "vllm_max_model_len")
"""Flags of which the trainer and the rollout server must have the same value."""


def _read_scripts(words: Sequence[str], reader: ScriptReader) -> Keys:
    """The keys of all scripts; those of `swift rlhf` override those of `swift rollout`."""
    keys: Keys = {}
    files = list(takewhile(lambda word: not word.startswith("-"), words))
    commands = [command for file in files for command in _read_script(file, reader)]
    for command in sorted(commands, key=lambda command: find_program(command.texts) == "rlhf"):
        script_keys = _read_launch(command)
        for name in set(script_keys) & set(keys):
            if name in SHARED_FLAGS and script_keys[name].value != keys[name].value:
                problem = f"conflicts with its value at {keys[name].place}"
                raise ConfigError(problem, file=script_keys[name].place, field=f"--{name}", remedy="keep one of them")
        keys |= script_keys
    return keys | _read_flags([Word(word, COMMAND_LINE) for word in words[len(files) :]])


def _read_script(name: str, reader: ScriptReader) -> list[Launch]:
    """The commands of ms-swift in a script: a server, a training, or one of each."""
    file, number = split_choice(name)
    launches = reader.read_all(file, lambda words: find_program(words) is not None)
    if not launches:
        remedy = "name the script that has the training command"
        raise ConfigError(f"has {NO_TRAINING}", file=display_path(file), remedy=remedy)
    kinds = {kind: [each for each in launches if find_program(each.texts) == kind] for kind in ("rollout", "rlhf")}
    return [
        choose_launch(same, file, number if kind == "rlhf" or not kinds["rlhf"] else None)
        for kind, same in kinds.items()
        if same
    ]


def _read_launch(launch: Launch) -> Keys:
    """The keys of a command, and those of its environment variables."""
    variables = {
        name: PlacedValue(parse_value(word.text, Path(word.place)), word.place)
        for name, word in launch.environment.items()
        if name in VARIABLES
    }
    program, start, _ = next(_programs(launch.texts))
    launcher = {name.upper(): placed for name, placed in _read_flags(launch.words[:program]).items()}
    variables |= {name: placed for name, placed in launcher.items() if name in PROCESS_VARIABLES}  # Flags of torchrun.
    return variables | _with_megatron_defaults(launch.texts, _read_flags(launch.words[start:]))


def _with_megatron_defaults(words: Sequence[str], keys: Keys) -> Keys:
    """The keys, with the defaults of `megatron rlhf` if that is the program."""
    if not any(Path(word).name == "megatron" or "_megatron" in word for word in words if not word.startswith("-")):
        return keys
    return {name: PlacedValue(value, "Megatron-SWIFT's default") for name, value in MEGATRON_DEFAULTS.items()} | keys


def _read_flags(words: Sequence[Word]) -> Keys:
    """The values of each flag; True for a flag without a value."""
    keys: Keys = {}
    flag, words_of_flag = None, list[Word]()
    for word in words:
        match = _FLAG.fullmatch(word.text)
        if match is None:
            variable = _VARIABLE.fullmatch(word.text) if flag is None else None
            if variable and variable[1] in VARIABLES:
                keys[variable[1]] = PlacedValue(parse_value(variable[2], Path(word.place)), word.place)
            words_of_flag.append(word)
            continue
        if flag is not None:
            keys[_flag_name(flag)] = _parse_flag(flag, words_of_flag)
        flag, words_of_flag = word, [Word(match[2], word.place)] if match[2] is not None else []
    return keys if flag is None else keys | {_flag_name(flag): _parse_flag(flag, words_of_flag)}


def _flag_name(flag: Word) -> str:
    match = _FLAG.fullmatch(flag.text)
    return match[1].replace("-", "_") if match else flag.text


def _parse_flag(flag: Word, words: Sequence[Word]) -> PlacedValue:
    values = [
        parse_value(word.text, Path(word.place)) if _TYPED_VALUE.fullmatch(word.text) else word.text for word in words
    ]
    if len(values) > 1:
        return PlacedValue(values, flag.place)
    return PlacedValue(values[0] if values else True, flag.place)
