"""Expands the variables, arrays and arithmetic of one word of a simple script, as bash does, without bash."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtrl_plugins.scripts.word import UNKNOWN_TEXT, Word

_WORD_END = re.compile(r"[\s;|&()<>]")
_ARRAY_USE = re.compile(r'"\$\{(\w+)\[@\]\}"(?=[\s;|&)]|$)')
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_SIMPLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>(?:[^{}\\]|\$\{[^{}]*\})*))?\}|\$(?P<bare>[A-Za-z_]\w*|\d)")
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}
"""For numbers that are not negative."""


@dataclass(slots=True)
class _Fields:
    """The texts that a word becomes: the text of an unquoted variable is split at spaces."""

    texts: list[str]
    current: str = ""
    is_open: bool = False

    def add(self, text: str, *, is_split: bool = False) -> None:
        if not is_split:
            self.current += text
            self.is_open = True
            return
        for piece in re.split(r"(\s+)", text):
            if piece.isspace():
                self.close()
            elif piece:
                self.add(piece)

    def close(self) -> None:
        if self.is_open:
            self.texts.append(self.current)
        self.current, self.is_open = "", False


@dataclass(slots=True)
class Expander:
    """Variables and arrays with their values."""

    variables: dict[str, str]
    arrays: dict[str, list[Word]]

    def expand_word(self, text: str, start: int, *, is_assignment: bool = False) -> tuple[list[str], int]:
        """What the word at `start` becomes, and where it ends; raises ValueError for what is not understood."""
        if match := _ARRAY_USE.match(text, start):
            return [word.text for word in self.arrays.get(match[1], [])], match.end()
        if (match := re.compile(r'"\$@"|\$@|\$\*').match(text, start)) is not None:
            return [], match.end()
        fields, position = _Fields([]), start
        if match := re.compile(r"~(?=[/\s]|$)").match(text, position):
            fields.add(self.variables.get("HOME", UNKNOWN_TEXT))
            position = match.end()
        while position < len(text) and not _WORD_END.match(text, position):
            position = self._expand_part(text, position, fields, is_assignment=is_assignment)
        fields.close()
        return fields.texts, position

    def _expand_part(self, text: str, at: int, fields: _Fields, *, is_assignment: bool) -> int:
        """Adds the quoted part, the expansion or the character at a position, and returns the next position."""
        match text[at]:
            case "'":
                end = _find(text, "'", at + 1)
                fields.add(text[at + 1 : end])
                return end + 1
            case '"':
                return self._expand_quoted(text, at + 1, fields)
            case "\\":
                if text[at + 1 : at + 2] != "\n":
                    fields.add(text[at + 1 : at + 2])
                return at + 2
            case "$" | "`":
                value, end = self._expand(text, at)
                fields.add(value, is_split=not is_assignment)
                return end
            case "{" if _BRACES.match(text, at):
                raise ValueError("braces are not understood without bash")
        fields.add(text[at])
        return at + 1

    def _expand_quoted(self, text: str, at: int, fields: _Fields) -> int:
        fields.add("")
        while at < len(text) and text[at] != '"':
            if text[at] == "\\" and text[at + 1 : at + 2] in '$`"\\\n':
                fields.add(text[at + 1].replace("\n", ""))
                at += 2
            elif text[at] in "$`":
                value, at = self._expand(text, at)
                fields.add(value)
            else:
                fields.add(text[at])
                at += 1
        if at == len(text):
            raise ValueError("is not valid shell: a quote is not closed")
        return at + 1

    def _expand(self, text: str, at: int) -> tuple[str, int]:
        """The value of what begins with `$` or a backtick, and where it ends."""
        if text.startswith("$((", at):
            end = _find(text, "))", at)
            return self._evaluate(text[at + 3 : end]), end + 2
        if text.startswith("$(", at):
            end = _find_closing(text, at + 1)
            is_pwd = text[at + 2 : end].strip() == "pwd"
            return (self.variables["PWD"] if is_pwd else UNKNOWN_TEXT), end + 1
        if text[at] == "`":
            return UNKNOWN_TEXT, _find(text, "`", at + 1) + 1
        if match := _SIMPLE.match(text, at):
            return self._value(match), match.end()
        if text.startswith("${", at):
            return UNKNOWN_TEXT, _find(text, "}", at) + 1
        if re.compile(r"\$[@*#?$!'\"-]").match(text, at):
            return UNKNOWN_TEXT, at + 2
        return "$", at + 1

    def _value(self, match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        if name in self.arrays:
            return UNKNOWN_TEXT
        value = self.variables.get(name, "")
        if value or match["default"] is None:
            return value
        fields = _Fields([])
        self._expand_quoted(match["default"].replace('"', "") + '"', 0, fields)
        return fields.current

    def _evaluate(self, text: str) -> str:
        """The result of arithmetic."""
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text.strip()).replace("/", "//")
        try:
            return str(self._evaluate_node(ast.parse(plain, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
            return UNKNOWN_TEXT

    def _evaluate_node(self, node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)) if abs(number) < 2**31:
                return number
            case ast.Name(id=name) if re.fullmatch(r"[1-9]\d{0,8}|0", self.variables.get(name, "")):
                return int(self.variables[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._evaluate_node(left), self._evaluate_node(right))
        raise ValueError(node)


def _find(text: str, what: str, start: int) -> int:
    end = text.find(what, start)
    if end < 0:
        raise ValueError(f"is not valid shell: {what} is missing")
    return end


def _find_closing(text: str, start: int) -> int:
    """Where the parenthesis at `start` is closed; quotes within are not understood if they hold parentheses."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError("is not valid shell: ) is missing")
