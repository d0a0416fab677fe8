"""Reads the settings of a command: a run file, overridden by options of the command line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.config.base import FrozenModel
from gateway.config.diagnostics import explain_validation_error
from gateway.config.environment import Expansion
from gateway.config.reader import parse_value, read_file
from gateway.errors import ConfigError, ConfigErrors
from trainer.cli.errors import NAMED_PATHS, RUN_FILE
from trainer.cli.meant_settings import MEANT_SETTINGS
from trainer.cli.options import find_jobs
from trainer.hub import HUB_NAME, find_model

BESIDE = ("./", "../")
"""How a path begins that is seen from the run file's folder."""
EXISTING = ("tools", "mcp", "model", "data", "chat_template")
"""Settings that name what is there already; others, such as `out` or a prompt, need not."""
MAX_PATH = 4096
UNKNOWN_KEY = "unknown key"
Settings = TypeVar("Settings", bound=FrozenModel)


def find_run_file(name: str | Path) -> Path:
    """The path of a run file, given as a path or as the name of a job that comes with the package."""
    jobs = find_jobs()
    file = jobs.get(str(name), Path(name))
    if file.is_dir():
        files = sorted(path for path in file.glob("*.y*ml") if path.is_file())
        remedy = f"name the run file in it: {files[0] if files else file / 'run.yaml'}"
        raise ConfigError("is a folder, not a run file", file=file, field="--config", remedy=remedy)
    if not file.is_file():
        remedy = f"name a YAML file, or one of {', '.join(jobs)}"
        raise ConfigError("there is no such run file", file=file, field="--config", remedy=remedy)
    return file


def read_run_file(file: Path | None) -> dict[str, Any]:
    """The content of a run file; empty without one."""
    if file is None:
        return {}
    settings = read_file(file) or {}
    if not isinstance(settings, dict):
        raise ConfigError("is not a mapping", file=file, remedy="write settings as `name: value`")
    return settings


def load_settings(
    kind: type[Settings],
    file: Path | None,
    options: Mapping[str, Any],
    ignored: Collection[str] = (),
    overrides: Iterable[str] = (),
) -> Settings:
    """The settings of a run file, overridden by options of the command line that are not None, and by `key=value`.

    Settings of the file that are `ignored` belong to other commands.
    """
    RUN_FILE.set(file)
    content = {name: value for name, value in read_run_file(file).items() if name not in ignored}
    if file is not None:
        content = {name: _find_beside(value, file.parent, name) for name, value in content.items()}
    values = {**content, **{name: value for name, value in options.items() if value is not None}}
    values = override_settings(values, overrides)
    _remember_texts(content)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        where = file or Path("the options")
        errors = explain_validation_error(error, values, where, Expansion({}, where), kind)
        raise ConfigErrors([_name_option(_name_meant(detail), options) for detail in errors]) from error


def fetch_model(settings: Settings) -> Settings:
    """The settings with the folders of the model, and of a teacher, in place of their names on the hub."""
    given: Any = settings
    algorithm: Any = getattr(given, "algorithm", None)
    reference: Any = algorithm and algorithm.kl.reference
    if reference and HUB_NAME.fullmatch(reference.model or ""):
        teacher = find_model(reference.model, field="algorithm.kl.reference.model")
        kl = algorithm.kl.model_copy(update={"reference": reference.model_copy(update={"model": str(teacher)})})
        settings = settings.model_copy(update={"algorithm": algorithm.model_copy(update={"kl": kl})})
    if not HUB_NAME.fullmatch(str(given.model)):
        return settings
    folder = find_model(given.model, with_code=given.trust_remote_code)
    return settings.model_copy(update={"model": type(given.model)(folder)})


def override_settings(values: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """The settings with those of words such as `update.lr=1e-4`, whose values are YAML."""
    values = deepcopy(values)
    for word in words:
        name, _, text = word.partition("=")
        *sections, key = name.split(".")
        inner: Any = values
        for depth, section in enumerate(sections, 1):
            if inner.get(section) is None:
                inner[section] = {}
            inner = inner[section]
            if not isinstance(inner, dict):
                remedy = f"write `{'.'.join(sections[:depth])}: {{...}}` in the run file, or set it as a whole"
                raise ConfigError(f"`{'.'.join(sections[:depth])}` is no section there", field=word, remedy=remedy)
        try:
            inner[key] = parse_value(text, Path("value.yaml"))
        except ConfigError as error:
            raise ConfigError(f"has no YAML value: {error.problem}", field=word, remedy="write KEY=VALUE") from error
    return values


def _name_meant(error: ConfigError) -> ConfigError:
    """The error about an unknown key, with what the key is called here."""
    owner, _, key = error.field.rpartition(".")
    meant = MEANT_SETTINGS.get(key)
    if error.problem != UNKNOWN_KEY or meant is None or meant == error.field:
        return error
    place = f"{owner}.{meant}" if owner and "." not in meant else meant
    return ConfigError(error.problem, file=error.file, field=error.field, remedy=f"you probably mean `{place}`")


def _find_beside(value: Any, folder: Path, name: str) -> Any:
    """The value, with each path that begins with `./` or `../` seen from the run file's folder, if it is there.

    What is not there is seen from the working folder, as other paths are; if it is nowhere, and has to be there, errors
    name it in the run file's folder. `./rewards.py:name` is such a path, too. `name` is the key of the value.
    """
    if isinstance(value, Mapping):
        return {key: _find_beside(item, folder, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_find_beside(item, folder, name) for item in value]
    if not isinstance(value, str) or not value.startswith(BESIDE) or len(value) > MAX_PATH or "\0" in value:
        return value
    path, colon, function = value.partition(":") if ".py:" in value else (value, "", "")
    found = os.path.abspath(folder / path)  # The run may be resumed from another working folder.
    is_missing = (name in EXISTING or bool(colon)) and not os.path.lexists(path)
    return f"{found}{colon}{function}" if os.path.lexists(found) or is_missing else value


def _remember_texts(content: Mapping[str, Any]) -> None:
    """Remembers every text of a run file, and refuses one that no path and no name can be."""
    texts = dict(_iterate_texts(content, ""))
    for name, text in texts.items():
        if "\0" in text:
            raise ConfigError("has a null character", field=name, remedy="write it without")
    NAMED_PATHS.set({**texts, **NAMED_PATHS.get()})


def _iterate_texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """The texts in a value, each by its dotted name."""
    if isinstance(value, str | Path):
        yield name, str(value)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _iterate_texts(item, f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}".lstrip("."))


def _name_option(error: ConfigError, options: Mapping[str, Any]) -> ConfigError:
    """The error with the option's name, if the value came from an option."""
    if options.get(error.field) is None:
        return error
    return ConfigError(error.problem, field=f"--{error.field}", remedy=error.remedy)
