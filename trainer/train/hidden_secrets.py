"""Hides what looks like a secret in copies of configuration files and in a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gateway.config.reader import read_file
from gateway.errors import GatewayError
from mtrl_plugins.client_files.import_servers import OPTION, QUERY_VALUE, SECRET_NAME, URL_PASSWORD

HIDDEN = "***"
SHORTEST = 5
"""Characters of a secret that is searched for; a shorter one may be part of other words."""
SECRET_KEY = re.compile(
    r"(api|access|private|secret|account)[_-]?key$|token$|secret|passw|pwd$|credential|authorization|cookie|dsn$",
    re.IGNORECASE,
)
"""Keys of a configuration file whose text is a secret; `SECRET_NAME` is for environment variables."""
SECRET_SECTIONS = ("env", "headers")
SECRET_FILES = (
    ".*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_ed25519*", "*credential*", "*secret*",
    "*token.json", "*token.txt", "*password*",
)  # fmt: skip


def may_hold_secrets(file: Path) -> bool:
    """Whether a file is one for secrets, by its name: environment files, keys, and all hidden files."""
    return file.suffix != ".py" and any(fnmatch(file.name.lower(), pattern) for pattern in SECRET_FILES)


def holds_secrets(file: Path) -> bool:
    """Whether a secret is found in a file that may be a configuration; in a file of another form, none is."""
    try:
        return next(_find_secrets(read_file(file)), None) is not None
    except (GatewayError, OSError, ValueError):
        return False


def hide_in_config(file: Path) -> str | None:
    """The text of a configuration file with `${NAME}` in place of secrets; None if they cannot be told apart."""
    try:
        text, tree = file.read_text(encoding="utf-8"), read_file(file)
    except (GatewayError, OSError, ValueError):
        return None
    secrets = sorted(_find_secrets(tree), key=lambda pair: -len(pair[1]))
    if any(len(secret) < SHORTEST for _, secret in secrets):
        return None
    for name, secret in secrets:
        for written in (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], secret):
            text = text.replace(written, f"${{{name}}}")
    is_left = any(secret in text for _, secret in secrets)
    return None if is_left or _is_written_otherwise(file, text) else text


def _is_written_otherwise(file: Path, text: str) -> bool:
    """Whether a secret is written in the file in a way in which it was not found, such as over several lines."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(text, encoding="utf-8")
        try:
            return next(_find_secrets(read_file(copy)), None) is not None
        except GatewayError:
            return True


def hide_in_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without the values of options for secrets, passwords in URLs, and their queries."""
    hidden = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, _ = word.partition("=")
        if equals and "://" not in name and SECRET_NAME.search(name):
            hidden.append(f"{name}={HIDDEN}")
        elif before.startswith("--") and "=" not in before and SECRET_NAME.search(before) and word[:1] != "-":
            hidden.append(HIDDEN)
        else:
            without = URL_PASSWORD.sub(rf"\g<user>:{HIDDEN}", word)
            hidden.append(QUERY_VALUE.sub(rf"\g<name>={HIDDEN}", without) if "://" in word else without)
    return hidden


def _find_secrets(value: Any, name: str = "", *, pattern: re.Pattern[str] = SECRET_KEY) -> Iterator[tuple[str, str]]:
    """The secrets in the content of a configuration file, each with the name of a variable to put in its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = SECRET_NAME if key in SECRET_SECTIONS else pattern
            yield from _find_secrets(item, str(key), pattern=inner)
    elif isinstance(value, list):
        yield from _find_in_words(value)
        for item in value:
            yield from _find_secrets(item, name, pattern=pattern)
    elif isinstance(value, str) and value and "${" not in value:
        if pattern.search(name):
            yield _variable(name), value
        elif "://" in value:
            yield from ((_variable(f"{name}_password"), found["password"]) for found in URL_PASSWORD.finditer(value))
            queries = QUERY_VALUE.finditer(value)
            yield from ((_variable(found["name"]), found["value"]) for found in queries if SECRET_NAME.search(found[1]))


def _find_in_words(words: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """The values of options for secrets, as `--token=VALUE` or in two words."""
    for word, after in zip(words, [*words[1:], None], strict=False):
        option = OPTION.fullmatch(word) if isinstance(word, str) else None
        if option is None or not SECRET_KEY.search(option["name"]):
            continue
        secret = option["value"] or after
        if isinstance(secret, str) and secret and "${" not in secret and not secret.startswith("-"):
            yield _variable(option["name"]), secret


def _variable(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_").upper() or "SECRET"
