"""Reads the commands of a simple script without bash, and refuses by line whatever it does not understand.

It understands commands in a row, comments, quotes, variables, arrays and arithmetic. Text that only bash can make, such
as the output of a command, is marked as unknown. No condition, loop, function or `+=` is ever guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.config.entries import display_path
from gateway.errors import ConfigError
from mtrl_plugins.scripts import stubs
from mtrl_plugins.scripts.expansion import Expander
from mtrl_plugins.scripts.word import UNKNOWN_TEXT, Launch, Word, show_text

IGNORED_COMMANDS = {
    "set", "ulimit", "echo", "printf", "wait", "true", ":", "date", "tee", "mkdir", "cat", *stubs.QUIET_COMMANDS
}  # fmt: skip
"""Commands that change no variable."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_REDIRECTION = re.compile(r"\d*(>>|>&|<|>|&>>|&>)")
_OPERATORS = ("&&", "||", ";;", "<<", "|", ";", "&", "(", ")")
REMEDY = "read it with bash (without --no-shell, where bubblewrap works), or write this without a shell's program"


def read_simple_script(
    file: Path, text: str, environment: Mapping[str, str], is_training: Callable[[Sequence[str]], bool]
) -> list[Launch]:
    """The training commands of a script."""
    variables = {**environment, "PWD": str(Path.cwd())}
    return list(_SimpleScript(str(display_path(file)), text, Expander(variables, {})).launches(is_training))


@dataclass(slots=True)
class _SimpleScript:
    """A script as it is read, from its first character to its last."""

    file: str
    text: str
    expander: Expander
    position: int = 0
    exported: dict[str, str] = field(default_factory=dict)

    def launches(self, is_training: Callable[[Sequence[str]], bool]) -> Iterator[Launch]:
        while self._skip_to_command():
            place = self._place()
            environment, words = self._read_command()
            variables = {name: Word(value, place) for name, value in {**self.exported, **environment}.items()}
            texts = [word.text for word in words]
            if is_training(texts):
                yield Launch(words, place, variables)
            elif not texts:
                self.expander.variables.update(environment)
            elif texts[0] == "exit":
                return
            else:
                self._check_ignored(texts, place)

    def _check_ignored(self, texts: Sequence[str], place: str) -> None:
        """Refuses commands that may change something, but not those before and after a training."""
        name = texts[0]
        if name == "cd":
            self.expander.variables["PWD"] = UNKNOWN_TEXT
        elif name in ("export", "declare", "readonly", "unset") or (name == "set" and "--" in texts):
            raise self._refuse(f"`{' '.join(texts)}` is not understood without bash", place)
        elif name not in IGNORED_COMMANDS and name not in stubs.LAUNCHERS:
            raise self._refuse(f"`{name}` is not understood without bash", place)

    def _skip_to_command(self) -> bool:
        """Moves to the next command; false at the end."""
        while match := re.compile(r"(?:\s|;|\\\n|#[^\n]*)+").match(self.text, self.position):
            self.position = match.end()
        return self.position < len(self.text)

    def _read_command(self) -> tuple[dict[str, str], list[Word]]:
        """The variables that are set for a command, and its words; moves behind it and what it is piped to."""
        environment: dict[str, str] = {}
        words: list[Word] = []
        while not self._is_at_end():
            place, start = self._place(), self.position
            match = _ASSIGNMENT.match(self.text, start)
            is_export = bool(words) and words[0].text == "export"
            if match and (not words or is_export):
                self._assign(match, environment, is_export=is_export)
            elif re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=").match(self.text, start) and not words:
                raise self._refuse("this assignment is not understood without bash", place)
            elif match := _REDIRECTION.match(self.text, start):
                self._skip_redirection(match)
            else:
                words += [Word(text, place) for text in self._read_word()]
                self._refuse_keyword(words, place)
        self._skip_pipe()
        if words and words[0].text == "export" and all(not word.text.startswith("-") for word in words[1:]):
            self.exported |= {name: self.expander.variables.get(name, "") for name in [w.text for w in words[1:]]}
            words = []
        return environment, words

    def _assign(self, match: re.Match[str], environment: dict[str, str], *, is_export: bool) -> None:
        name, self.position = match[1], match.end()
        if self.text.startswith("(", self.position):
            self.position += 1
            self.expander.arrays[name] = [*self._read_array()]
            return
        value = " ".join(self._read_word(is_assignment=True))
        if is_export:
            self.exported[name] = self.expander.variables[name] = value
        else:
            environment[name] = value

    def _read_array(self) -> Iterator[Word]:
        while self._skip_to_command():
            if self.text[self.position] == ")":
                self.position += 1
                return
            place = self._place()
            yield from (Word(text, place) for text in self._read_word())
        raise self._refuse("an array is not closed", self._place())

    def _is_at_end(self) -> bool:
        """Skips spaces; true at the end of a command."""
        while match := re.compile(r"[ \t]+|\\\n|#[^\n]*").match(self.text, self.position):
            self.position = match.end()
        rest = self.text[self.position : self.position + 3]
        if not rest or rest[0] == "\n":
            return True
        operator = next((each for each in _OPERATORS if rest.startswith(each)), None)
        if operator in ("&&", "||", "(", ")", ";;", "<<") or re.match(r"[<>]\(|<<|&[<>]\(", rest):
            raise self._refuse(f"`{operator or rest[:2]}` is not understood without bash", self._place())
        return operator is not None and not rest.startswith("&>")

    def _skip_pipe(self) -> None:
        """Moves behind `| tee log`: what a program prints sets no argument."""
        while self.text.startswith("|", self.position):
            self.position += 1
            place = self._place()
            _, words = self._read_command()
            if not words or words[0].text not in (*stubs.TEXT_COMMANDS, "tee"):
                raise self._refuse("a pipe is not understood without bash", place)
        if self.text.startswith("&", self.position):
            self.position += 1

    def _skip_redirection(self, match: re.Match[str]) -> None:
        self.position = match.end()
        if not self._is_at_end():
            self._read_word()

    def _refuse_keyword(self, words: Sequence[Word], place: str) -> None:
        keywords = ("if", "for", "while", "until", "case", "function", "select", "{", "[[", "[", "!", "eval", "exec")
        if len(words) == 1 and words[0].text in (*keywords, "time", "test", "read", "let", "shift", "alias", "trap"):
            raise self._refuse(f"`{words[0].text}` is not understood without bash", place)

    def _read_word(self, *, is_assignment: bool = False) -> list[str]:
        """The texts that a word becomes: usually one, several for an array, none for `$@`."""
        try:
            texts, self.position = self.expander.expand_word(self.text, self.position, is_assignment=is_assignment)
        except ValueError as error:
            raise self._refuse(str(error), self._place()) from None
        return texts

    def _place(self) -> str:
        return f"{self.file}:{self.text.count(chr(10), 0, self.position) + 1}"

    def _refuse(self, problem: str, place: str) -> ConfigError:
        return ConfigError(show_text(problem), file=place, remedy=REMEDY)
