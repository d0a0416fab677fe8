"""What somebody wrote for verl: keys with dots, each with its value and the place where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config.entries import shown
from gateway.config.read import read_placed, value
from gateway.errors import ConfigError
from trainer.verl import shell
from trainer.verl.shell import Word

TYPED = "the command line"
OWN = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own complete configurations: what they say is the default of each key here."""
KEY = re.compile(r"(?P<how>\+{0,2}|~)(?P<key>[A-Za-z_][\w.@/-]*)(=(?P<value>.*))?", re.DOTALL)
ASIDE = ("hydra", "defaults", "_target_")


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and the place where it stands: `run.yaml:12`."""

    value: Any
    place: str


Keys = dict[str, Given]


def written(source: Path | None, words: Sequence[str]) -> Keys:
    """The keys of a file, under those of the command line."""
    keys = _of_file(source) if source is not None else {}
    return _changed(keys, [Word(word, TYPED) for word in words])


def of_words(words: Sequence[str]) -> Keys:
    """A whole command, or a file and what goes over it."""
    if any(shell.MAIN.search(word) for word in words):
        return _of_command([Word(word, TYPED) for word in words])
    file = next((Path(word) for word in words if not _is_change(word)), None)
    return written(file, [word for word in words if _is_change(word)])


def _is_change(word: str) -> bool:
    found = KEY.fullmatch(word)
    return found is not None and (found["value"] is not None or found["how"] == "~")


def _of_file(file: Path) -> Keys:
    if file.suffix in (".yaml", ".yml"):
        return _of_yaml(file, ())
    return _of_command(shell.command(file))


def _of_command(words: Sequence[Word]) -> Keys:
    """`--config-path` and `--config-name` name a file; all other words with `=` are keys."""
    options = {name: found for name in ("config-path", "config-name") if (found := _option(words, name))}
    named = options.get("config-name")
    stem = named.text.removesuffix(".yaml") if named is not None else ""
    keys: Keys = {}
    if named is not None and stem not in OWN:
        folder = Path(options["config-path"].text if "config-path" in options else "").expanduser()
        file = folder / f"{stem}.yaml"
        if not file.is_file():
            remedy = "copy it from verl's examples, or name it with --config-path"
            raise ConfigError(f"there is no file {file}", file=named.place, field="--config-name", remedy=remedy)
        keys = _of_yaml(file, ())
    return _changed(keys, [word for word in words if _is_change(word.text) and not word.text.startswith("-")])


def _option(words: Sequence[Word], name: str) -> Word | None:
    for place, word in enumerate(words):
        if word.text == f"--{name}" and place + 1 < len(words):
            return words[place + 1]
        if word.text.startswith(f"--{name}="):
            return Word(word.text.partition("=")[2], word.place)
    return None


def _changed(keys: Keys, words: Iterable[Word]) -> Keys:
    changed = dict(keys)
    for word in words:
        found = KEY.fullmatch(word.text)
        if found is None or (found["value"] is None and found["how"] != "~"):
            problem = f"{word.text!r} is no `key=value`"
            raise ConfigError(problem, file=word.place, remedy="write it as `data.train_batch_size=256`")
        key = found["key"]
        if found["how"] == "~":
            changed = {old: given for old, given in changed.items() if not f"{old}.".startswith(f"{key}.")}
            continue
        said = value(found["value"], Path(word.place)) if found["value"] else ""
        changed.update(_flat(said, key, {}, word.place))
    return changed


def _of_yaml(file: Path, within: tuple[Path, ...]) -> Keys:
    """With the files of its `defaults` under it, as far as they lie beside it."""
    tree, lines = read_placed(file)
    if not isinstance(tree, dict):
        raise ConfigError("is no mapping", file=shown(file), remedy="name a YAML file as verl's trainer takes it")
    keys: Keys = {}
    for base in _bases(tree.get("defaults"), file, lines):
        if base in (*within, file):
            raise ConfigError(f"its `defaults` lead back to {base}", file=shown(file), remedy="take that line out")
        keys.update(_of_yaml(base, (*within, file)))
    places = {".".join(map(str, loc)): f"{shown(file)}:{line}" for loc, line in lines.items()}
    for name, inner in tree.items():
        if name not in ASIDE:
            keys.update(_flat(inner, name, places, str(shown(file))))
    return keys


def _bases(defaults: Any, file: Path, lines: Mapping[Any, int]) -> Iterator[Path]:
    for entry in defaults if isinstance(defaults, list) else ():
        name = entry if isinstance(entry, str) else next(iter(entry), "")
        beside = file.parent / f"{name}.yaml"
        if isinstance(entry, str) and beside.is_file():
            yield beside
        elif name not in (*OWN, "_self_"):
            place = f"{shown(file)}:{lines.get(('defaults',), 1)}"
            remedy = "write what it says into this file"
            raise ConfigError(f"{name!r} does not lie beside the file", file=place, field="defaults", remedy=remedy)


def _flat(tree: Any, key: str, places: Mapping[str, str], place: str) -> Iterator[tuple[str, Given]]:
    """An empty mapping is a value."""
    place = places.get(key, place)
    if not isinstance(tree, dict) or not tree:
        yield key, Given(tree, place)
        return
    for name, inner in tree.items():
        if name not in ASIDE:
            yield from _flat(inner, f"{key}.{name}", places, place)
