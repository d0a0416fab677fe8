"""Reads the words of a command line for Hydra: its options, and overrides such as `+data.seed=1` and `a=[1,'b']`.

Hydra's own parser needs release 4.9 of the package `antlr4-python3-runtime`, of which the comparison of answers
(`mtrl-rl[math]`) needs 4.13, so that no environment has both. The tests compare this reader with what Hydra 1.3 says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gateway.errors import ConfigError
from mtrl_plugins.scripts.launches import Word

CONFIG_PATH, CONFIG_NAME = "--config-path", "--config-name"
NAMED_OPTIONS = {
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), CONFIG_PATH),
    **dict.fromkeys(("--config-name", "-cn"), CONFIG_NAME),
}
"""Options with a value."""
RUN_OPTIONS = ("--run", "-r")
"""What Hydra does anyway."""
OVERRIDE = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<key>[A-Za-z_][\w.@/-]*)(=(?P<value>.*))?", re.DOTALL)
FORM = "write `key=value`, without blanks around `=`"
SPECIAL = re.compile(r"[#&!=()<>;^`\"'\]}]")
"""What Hydra refuses in a value that is not quoted."""
INTEGER = re.compile(r"[+-]?(0|[1-9](_?\d)*)")
FLOAT = re.compile(r"[+-]?((\d[\d_]*\.\d*|\.\d+)(e[+-]?\d+)?|\d[\d_]*e[+-]?\d+|inf|nan)", re.IGNORECASE)
FUNCTION = re.compile(r"\w+\s*\(")
REFERENCE = re.compile(r"\$\{[^{}]*(\{[^{}]*\}[^{}]*)*\}")
MAX_DEPTH = 20


class HydraWords(NamedTuple):
    """The words after a program that Hydra starts."""

    options: dict[str, Word]
    overrides: list[Word]


def read_words(words: Sequence[Word]) -> HydraWords:
    """Raises ConfigError for a word that is neither an option that Hydra has nor an override."""
    options: dict[str, Word] = {}
    overrides: list[Word] = []
    rest = iter(words)
    for word in rest:
        if not word.text.startswith("-"):
            require_override(word)
            overrides.append(word)
            continue
        name, has_value, value = word.text.partition("=")
        if (option := NAMED_OPTIONS.get(name)) is not None:
            given = Word(value, word.place) if has_value else next(rest, None)
            if given is None:
                raise ConfigError("has no value", file=word.place, field=name, remedy=f"write `{name} VALUE`")
            options[option] = given
        elif name in ("--multirun", "-m"):
            remedy = "translate each training by itself"
            raise ConfigError("starts several trainings", file=word.place, field=name, remedy=remedy)
        elif name not in RUN_OPTIONS:
            known = ", ".join((*NAMED_OPTIONS, *RUN_OPTIONS))
            problem = f"{word.text!r:.80} is no option of a training; those of Hydra are {known}"
            raise ConfigError(problem, file=word.place, remedy="remove it")
    return HydraWords(options, overrides)


def is_override(text: str) -> bool:
    """Whether a word is `key=value` or `~key`."""
    match = OVERRIDE.fullmatch(text)
    return match is not None and (match["value"] is not None or match["prefix"] == "~")


def require_override(word: Word) -> re.Match[str]:
    """The parts of an override."""
    match = OVERRIDE.fullmatch(word.text)
    if match is None or not is_override(word.text):
        raise ConfigError(f"{word.text!r:.80} is not `key=value`", file=word.place, remedy=FORM)
    return match


def read_value(text: str, place: str) -> Any:
    """The value of an override."""
    try:
        reader = _ValueReader(text)
        value = reader.read("")
        if reader.text[reader.at :].strip():
            raise ValueError(f"{reader.text[reader.at :]!r:.40} is left over")
        return value
    except ValueError as error:
        remedy = "write a single value, and quote what is text: `key=\"'a, b'\"`, `key=[1,2]`"
        raise ConfigError(f"Hydra cannot read {text!r:.80}: {error}", file=place, remedy=remedy) from error


class _ValueReader:
    """Reads a value from the left; `at` is where the rest begins."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def read(self, stops: str, depth: int = 0) -> Any:
        """The value before one of the characters `stops`."""
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        match self._peek():
            case "'" | '"':
                return self._read_quoted()
            case "[":
                return [self.read(",]", depth + 1) for _ in self._items("]")]
            case "{":
                return {self._read_key(): self.read(",}", depth + 1) for _ in self._items("}")}
        return self._read_plain(stops)

    def _peek(self) -> str:
        """The next character that is no blank."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _items(self, end: str) -> Iterator[None]:
        """Yields before each item of a list or mapping, which is read meanwhile."""
        self.at += 1
        if self._peek() == end:
            self.at += 1
            return
        while True:
            yield
            found = self._peek()
            self.at += 1
            if found == end:
                return
            if found != ",":
                raise ValueError(
                    f"there is no `{end}`" if not found else f"`{found}` is where `,` or `{end}` should be"
                )

    def _read_quoted(self) -> str:
        quote = self.text[self.at]
        match = re.compile(rf"{quote}((?:\\.|[^\\{quote}])*){quote}", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise ValueError(f"there is no second {quote}")
        self.at = match.end()
        return re.sub(rf"\\([\\{quote}])", r"\1", match[1])

    def _read_key(self) -> str:
        key = str(self._read_plain(":"))
        if self._peek() != ":":
            raise ValueError(f"there is no `:` after {key!r}")
        self.at += 1
        return key

    def _read_plain(self, stops: str) -> Any:
        """A number, a boolean, null or a text, with `\\,` for a comma."""
        start, text = self.at, ""
        while (found := self.text[self.at : self.at + 1]) and found not in stops:
            if reference := REFERENCE.match(self.text, self.at):
                text += reference[0]
                self.at = reference.end()
                continue
            if found == "," and not stops:
                raise ValueError("commas separate the values of several trainings")
            if FUNCTION.match(self.text, self.at) and self.at == start:
                raise ValueError("functions are not called")
            if SPECIAL.match(found):
                raise ValueError(f"`{found}` is not quoted")
            if found == "\\" and self.text[self.at + 1 : self.at + 2] in tuple("\\()[]{}:=, \t"):
                self.at += 1
                found = self.text[self.at]
            text += found
            self.at += 1
        return _type_plain(text.strip())


def _type_plain(text: str) -> Any:
    if text.lower() in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else text
