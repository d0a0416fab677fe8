"""What somebody wrote for ms-swift: `swift rlhf --flag value ...`, typed or in scripts, as keys with their places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway.config.entries import shown
from gateway.config.read import value
from gateway.errors import ConfigError
from trainer.flags.left_out import left_out
from trainer.verl import shell
from trainer.verl.shell import Word
from trainer.verl.written import TYPED, Given, Keys

BEGINS = re.compile(r"^(?!\s*#).*\b(swift|megatron)\s+(rlhf|rollout)\b", re.MULTILINE)
RLHF, ROLLOUT = (re.compile(rf"\bswift\s+{name}\b") for name in ("rlhf", "rollout"))
PROCESSES = ("NPROC_PER_NODE", "NNODES")
"""Variables that say how many processes share a batch."""
VARIABLES = (*PROCESSES, "MAX_PIXELS")
"""Those that a result depends on."""
_VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
_MEANS = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|none|null|[\[{].*", re.DOTALL | re.IGNORECASE)
"""Any other value is a text as it stands."""
_COUNTED = re.compile(rf"\s*(?:export\s+)?({'|'.join(VARIABLES)})=(\d+)")
_FLAG = re.compile(r"--([A-Za-z_][\w-]*)(?:=(.*))?", re.DOTALL)


def is_swift(words: Sequence[str]) -> bool:
    """Whether these words, or the first file among them, are for ms-swift."""
    if BEGINS.search(" ".join(words)):
        return True
    return any(BEGINS.search(_text(Path(word))) for word in words if Path(word).suffix not in (".yaml", ".yml"))


def of_words(words: Sequence[str]) -> Keys:
    """A whole command, or scripts and the flags that go over theirs; and what ms-swift takes where they say nothing."""
    whole = bool(BEGINS.search(" ".join(words)))
    keys = _of_command([Word(word, TYPED) for word in words]) if whole else _of_scripts(words)
    plugins = keys["external_plugins"].value if "external_plugins" in keys else []
    files = plugins if isinstance(plugins, list) else [plugins]
    return keys | left_out(keys, [_text(Path(str(file))) for file in files])


def _of_scripts(words: Sequence[str]) -> Keys:
    """What trains goes over what only rolls out."""
    keys: Keys = {}
    files = [Path(word) for word in _before_flags(words)]
    for file in sorted(files, key=lambda file: RLHF.search(_text(file)) is not None):
        found = _of_file(file)
        for name in set(found) & set(keys):
            if _shared(name) and found[name].value != keys[name].value:
                problem = f"is also written at {keys[name].place}, and says something else there"
                raise ConfigError(problem, file=found[name].place, field=f"--{name}", remedy="keep one of them")
        keys |= found
    return keys | _of_command([Word(word, TYPED) for word in words[len(files) :]])


def _shared(name: str) -> bool:
    """Whether trainer and server must say the same; what is the server's own stays its own."""
    return name in ("model", "max_turns", "multi_turn_scheduler", "gym_env", "use_gym_env", "vllm_max_model_len")


def _before_flags(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("-"):
            return
        yield word


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def _of_file(file: Path) -> Keys:
    """Of a script that serves and trains, both commands."""
    text, keys = _text(file), dict[str, Given]()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _COUNTED.match(line):
            keys[found[1]] = Given(int(found[2]), f"{shown(file)}:{number}")
    for begins in (ROLLOUT, RLHF):
        if any(begins.search(line) for line in text.splitlines() if not line.lstrip().startswith("#")):
            keys |= _of_command(shell.command(file, begins))
    return keys if {*keys} - {*VARIABLES} else _of_command(shell.command(file, RLHF))


def _of_command(words: Sequence[Word]) -> Keys:
    """Each flag with its values; a flag without any is true."""
    keys: Keys = {}
    flag, said = None, list[Word]()
    for word in words:
        found = _FLAG.fullmatch(word.text)
        if found is None:
            variable = _VARIABLE.fullmatch(word.text) if flag is None else None
            if variable and variable[1] in VARIABLES:
                keys[variable[1]] = Given(value(variable[2], Path(word.place)), word.place)
            said.append(word)
            continue
        if flag is not None:
            keys[_name(flag)] = _given(flag, said)
        flag, said = word, [Word(found[2], word.place)] if found[2] is not None else []
    return keys if flag is None else keys | {_name(flag): _given(flag, said)}


def _name(flag: Word) -> str:
    found = _FLAG.fullmatch(flag.text)
    return found[1].replace("-", "_") if found else flag.text


def _given(flag: Word, said: Sequence[Word]) -> Given:
    values = [value(word.text, Path(word.place)) if _MEANS.fullmatch(word.text) else word.text for word in said]
    if len(values) > 1:
        return Given(values, flag.place)
    return Given(values[0] if values else True, flag.place)
