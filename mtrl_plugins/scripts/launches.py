"""What a confined bash recorded: the commands that a script launches, and what could not be read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mtrl_plugins.scripts import stubs

UNKNOWN_TEXT = "\N{REPLACEMENT CHARACTER}"
"""Stands for text that is not known, such as the output of a command that is not run."""


MAX_SHOWN = 200


def show_text(text: str) -> str:
    """Text of a script for an error: short, and without characters that a terminal would act on."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command with the place where it was written."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that a script launches, with its environment variables."""

    words: Sequence[Word]
    place: str
    environment: Mapping[str, Word] = field(default_factory=dict)
    """The values of its environment variables."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The words without their places."""
        return tuple(word.text for word in self.words)

    @property
    def summary(self) -> str:
        """The first words, for messages."""
        texts = self.texts
        return " ".join(texts[:4]) + (" ..." if len(texts) > 4 else "")


_HASH_COMMENT = re.compile(r"\s*#")
_NAME = re.compile(r"\+{0,2}~?[\w.@/-]+=|--[\w-]+")
_BASH_ERROR = re.compile(r"line (\d+): (.*)")


@dataclass(frozen=True, slots=True)
class Run:
    """A stub that ran: its words, the line of the script, and its environment."""

    words: tuple[str, ...]
    line: int
    environment: Mapping[str, str]

    @property
    def prints_something(self) -> bool:
        """True for a program whose output scripts use."""
        return self.words[0] != "sleep"


@dataclass(frozen=True, slots=True)
class Note:
    """Something in a script that could not be done: `kind` is `missing`, `source` or `folder`."""

    kind: str
    line: int
    text: str
    runs_before: int
    """How many stubs had run by then."""


@dataclass(slots=True)
class Records:
    """All stubs that ran and all notes, in their order."""

    runs: list[Run] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @classmethod
    def parse(cls, data: bytes) -> Records:
        """Records of several processes may be mixed: each item begins with its process's number."""
        records, open_runs = cls(), dict[str, tuple[list[str], dict[str, str]]]()
        for item in data.decode(errors="replace").split("\0")[:-1]:
            process, _, rest = item.partition(" ")
            kind, _, text = rest.partition(" ")
            if kind == "run":
                open_runs[process] = ([text], {})
            elif kind in ("missing", "source", "folder"):
                line, _, text = text.partition(":")
                records.notes.append(Note(kind, _parse_line(line), text, len(records.runs)))
            elif process in open_runs:
                records._add(kind, text, process, open_runs)
        return records

    def _add(self, kind: str, text: str, process: str, open_runs: dict[str, tuple[list[str], dict[str, str]]]) -> None:
        words, environment = open_runs[process]
        if kind == "word":
            words.append(text)
        elif kind in ("env", "line"):
            name, _, value = text.partition("=") if kind == "env" else ("MTRL_LINE", "", text)
            environment[name] = value
        elif kind == "end":
            line = _parse_line(environment.get("MTRL_LINE", ""))
            named = {name: value for name, value in environment.items() if not name.startswith(stubs.SETTINGS_PREFIX)}
            self.runs.append(Run(tuple(words), line, named))
            del open_runs[process]


def _parse_line(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def bash_errors(messages: str, script: str) -> Iterator[tuple[int, str]]:
    """Bash's own messages about a script, with their lines."""
    for message in messages.splitlines():
        if message.startswith(f"{script}: ") and (match := _BASH_ERROR.match(message, len(script) + 2)):
            yield int(match[1]), match[2]


def merge_unknown(words: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The words of the same command from several runs, with marks where they differ; None if too much differs."""
    if len({len(each) for each in words}) > 1:
        return None
    return tuple(_merge_texts(texts) for texts in zip(*words, strict=True))


def _merge_texts(texts: Sequence[str]) -> str:
    first = texts[0]
    if all(text == first for text in texts):
        return first
    shortest = min(map(len, texts))
    start = next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)
    rest = shortest - start
    end = next((i for i in range(rest) if len({text[-1 - i] for text in texts}) > 1), rest)
    return first[:start] + UNKNOWN_TEXT + first[len(first) - end :]


def place_launch(
    words: Sequence[str], environment: Mapping[str, str], line: int, lines: Sequence[str], file: str
) -> Launch:
    """A command with the lines where its words and variables are written, as well as these can be found."""
    last = line
    while 0 < last < len(lines) and lines[last - 1].rstrip().endswith("\\"):
        last += 1
    near = [number for number in range(line, last + 1) if 0 < number <= len(lines)]
    far = [number for number, text in enumerate(lines, 1) if not _HASH_COMMENT.match(text) and number not in near]

    def place(word: str) -> str:
        return f"{file}:{_find_line(word, lines, near, far) or line}"

    variables = {name: Word(value, place(f"{name}={value}")) for name, value in environment.items()}
    return Launch([Word(word, place(word)) for word in words], f"{file}:{line}", variables)


def _find_line(word: str, lines: Sequence[str], near: Sequence[int], far: Sequence[int]) -> int | None:
    """The line with the whole word, else with its key: first within the command, then before it, then anywhere."""
    match = _NAME.match(word)
    for text in (word, match[0] if match else word):
        is_written = re.compile(rf"(?<![\w.-]){re.escape(text)}")
        for numbers in (near, far):
            if found := next((number for number in numbers if is_written.search(lines[number - 1])), None):
                return found
    return None
