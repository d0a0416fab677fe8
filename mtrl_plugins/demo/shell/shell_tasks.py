"""Generates small shell tasks of twenty kinds: count, find, edit, and mend what a first command shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from random import Random

from gateway.types import ToolSpec
from mtrl_plugins.demo.problem import HELD_OUT_SHARE, ExpectedCall, Problem, Split
from trainer.rollout.task import Task

NOUNS = (
    "ape", "bear", "bee", "boa", "cow", "crow", "deer", "dog", "duck", "elk", "emu", "fox",
    "goat", "hawk", "kiwi", "lion", "lynx", "mole", "newt", "owl", "pig", "seal", "swan", "wolf",
)  # fmt: skip
NAMES = (
    "agenda", "budget", "diary", "draft", "essay", "index", "ledger", "letter",
    "menu", "news", "notes", "plan", "recipe", "report", "story", "todo",
)  # fmt: skip
FOLDERS = ("attic", "cellar", "garage", "garden", "hall", "kitchen", "office", "studio")
TOOLS = (ToolSpec("shell", parameters={"type": "object", "properties": {"command": {"type": "string"}}}),)
"""The part of the tool's schema that the chat template of the demos shows."""
DONE = "done"
"""The last turn of a demonstration: what counts is the working folder."""
SILENT = "[no output]"
Files = dict[str, str]


@dataclass(frozen=True, slots=True)
class Draft:
    """A task: what is asked, the working folder before and after, and commands that do it, with what they print."""

    request: str
    files: Files
    expected: Files
    commands: tuple[tuple[str, str], ...]

    @property
    def split(self) -> Split:
        """No request is in both splits."""
        return "train" if sha256(self.request.encode()).digest()[0] % HELD_OUT_SHARE else "held_out"


class Words:
    """What a task is about, drawn at random: names, and files with one noun a line."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.noun, self.other, *self.nouns = draw.sample(NOUNS, 8)
        self.file, self.out, self.script = (f"{name}.txt" for name in draw.sample(NAMES, 3))
        self.script = self.script.replace(".txt", ".sh")
        self.folder, self.elsewhere = draw.sample(FOLDERS, 2)

    def lines(self, *nouns: str) -> str:
        """Some lines, in some order, among them these."""
        lines = [*nouns, *self.draw.choices(self.nouns, k=self.draw.randint(2, 5))]
        self.draw.shuffle(lines)
        return "".join(f"{line}\n" for line in lines)

    def with_noun(self) -> str:
        return self.lines(*[self.noun] * self.draw.randint(1, 3))


def _write(request: str, command: str, find: Callable[[Words, str], str]) -> Callable[[Words], Draft]:
    """A kind whose command writes to another file what it finds in one."""

    def make(words: Words) -> Draft:
        text = words.with_noun()
        names = {"f": words.file, "w": words.noun, "o": words.out}
        after = {words.file: text, words.out: find(words, text)}
        line = f"{command} > {{o}}".format(**names)
        return Draft(request.format(**names), {words.file: text}, after, ((line, SILENT),))

    return make


def _edit(request: str, command: str, change: Callable[[Words, str], str]) -> Callable[[Words], Draft]:
    """A kind whose command changes a file."""

    def make(words: Words) -> Draft:
        text = words.with_noun()
        names = {"f": words.file, "w": words.noun, "x": words.other}
        after = {words.file: change(words, text)}
        return Draft(request.format(**names), {words.file: text}, after, ((command.format(**names), SILENT),))

    return make


def _number(lines: list[str]) -> str:
    return f"{len(lines)}\n"


def _keep(text: str, noun: str, *, has: bool = True) -> list[str]:
    return [line for line in text.splitlines(keepends=True) if (line == f"{noun}\n") == has]


def _count_files(words: Words) -> Draft:
    names = words.draw.sample(NAMES, words.draw.randint(1, 5))
    files = {f"{words.folder}/{name}.txt": words.lines() for name in names}
    request = f"Count the files in {words.folder}. Write the number to {words.out}."
    command = f"ls {words.folder} | wc -l > {words.out}"
    return Draft(request, files, {**files, words.out: _number(names)}, ((command, SILENT),))


def _hide(words: Words) -> tuple[Files, str]:
    """Files in two folders, and the one with the noun."""
    hidden = f"{words.folder}/{words.file}"
    others = {f"{folder}/{words.script[:-3]}.txt": words.lines() for folder in (words.folder, words.elsewhere)}
    return {**others, hidden: words.with_noun()}, hidden


def _find_path(words: Words) -> Draft:
    files, hidden = _hide(words)
    request = f"Find {words.file}. Write its path to {words.out}."
    command = f"find . -name {words.file} > {words.out}"
    return Draft(request, files, {**files, words.out: f"./{hidden}\n"}, ((command, SILENT),))


def _find_word(words: Words) -> Draft:
    files, hidden = _hide(words)
    request = f"Write the name of the file with {words.noun} in {words.folder} to {words.out}."
    command = f"grep -l {words.noun} {words.folder}/* > {words.out}"
    return Draft(request, files, {**files, words.out: f"{hidden}\n"}, ((command, SILENT),))


def _rename(words: Words) -> Draft:
    text, request = words.lines(), f"Rename {words.file} to {words.out}."
    return Draft(request, {words.file: text}, {words.out: text}, ((f"mv {words.file} {words.out}", SILENT),))


def _remove(words: Words) -> Draft:
    file, others = f"{words.folder}/{words.file}", {f"{words.folder}/{words.out}": words.lines()}
    request, files = f"Remove {words.file} in {words.folder}.", {**others, file: words.lines()}
    return Draft(request, files, others, ((f"rm {file}", SILENT),))


def _mend_word(words: Words) -> Draft:
    script, old, new = words.script, f"echo {words.noun}", f"echo {words.other}"
    commands = ((f"cat {script}", old), (f"sed -i s/{words.noun}/{words.other}/ {script}", SILENT))
    return Draft(f"Make {script} print {words.other}.", {script: f"{old}\n"}, {script: f"{new}\n"}, commands)


def _mend_file(words: Words) -> Draft:
    script, text = words.script, {words.file: words.lines()}
    commands = ((f"cat {script}", f"sort {words.out}"), (f"sed -i s/{words.out}/{words.file}/ {script}", SILENT))
    before, after = f"sort {words.out}\n", f"sort {words.file}\n"
    return Draft(f"Make {script} sort {words.file}.", {script: before, **text}, {script: after, **text}, commands)


def _remove_found(words: Words) -> Draft:
    files, hidden = _hide(words)
    commands = ((f"grep -l {words.noun} {words.folder}/*", hidden), (f"rm {hidden}", SILENT))
    after = {name: text for name, text in files.items() if name != hidden}
    return Draft(f"Remove the file with {words.noun} in {words.folder}.", files, after, commands)


def _append_found(words: Words) -> Draft:
    files, hidden = _hide(words)
    commands = ((f"find . -name {words.file}", f"./{hidden}"), (f"echo {words.other} >> ./{hidden}", SILENT))
    request = f"Find {words.file}. Append {words.other} to it."
    return Draft(request, files, {**files, hidden: f"{files[hidden]}{words.other}\n"}, commands)


def _follow(words: Words) -> Draft:
    named, text = f"{words.script[:-3]}.txt", words.lines()
    files = {words.file: f"{named}\n", named: text}
    commands = ((f"cat {words.file}", named), (f"head -n 1 {named} > {words.out}", SILENT))
    request = f"Write the first line of the file that {words.file} names to {words.out}."
    return Draft(request, files, {**files, words.out: text.splitlines(keepends=True)[0]}, commands)


def _sorted(lines: list[str] | set[str]) -> str:
    return "".join(sorted(lines))


KINDS: Mapping[str, Callable[[Words], Draft]] = {
    "count-lines": _write(
        "Count the lines of {f}. Write the number to {o}.", "wc -l < {f}", lambda _, text: _number(text.splitlines())
    ),
    "count-with": _write(
        "Count the lines of {f} with {w}. Write the number to {o}.", "grep -c {w} {f}",
        lambda words, text: _number(_keep(text, words.noun)),
    ),
    "count-without": _write(
        "Count the lines of {f} without {w}. Write the number to {o}.", "grep -vc {w} {f}",
        lambda words, text: _number(_keep(text, words.noun, has=False)),
    ),
    "count-files": _count_files,
    "first": _write(
        "Write the first line of {f} to {o}.", "head -n 1 {f}", lambda _, text: text.splitlines(keepends=True)[0]
    ),
    "without": _write(
        "Write the lines of {f} without {w} to {o}.", "grep -v {w} {f}",
        lambda words, text: "".join(_keep(text, words.noun, has=False)),
    ),
    "sort": _write("Sort {f} into {o}.", "sort {f}", lambda _, text: _sorted(text.splitlines(keepends=True))),
    "unique": _write(
        "Sort {f} without doubles into {o}.", "sort -u {f}", lambda _, text: _sorted({*text.splitlines(keepends=True)})
    ),
    "find-path": _find_path,
    "find-word": _find_word,
    "replace": _edit(
        "Replace {w} by {x} in {f}.", "sed -i s/{w}/{x}/ {f}",
        lambda words, text: text.replace(f"{words.noun}\n", f"{words.other}\n"),
    ),
    "delete": _edit(
        "Delete the lines of {f} with {w}.", "sed -i /{w}/d {f}",
        lambda words, text: "".join(_keep(text, words.noun, has=False)),
    ),
    "append": _edit("Append {w} to {f}.", "echo {w} >> {f}", lambda words, text: f"{text}{words.noun}\n"),
    "rename": _rename,
    "remove": _remove,
    "mend-word": _mend_word,
    "mend-file": _mend_file,
    "remove-found": _remove_found,
    "append-found": _append_found,
    "follow": _follow,
}  # fmt: skip
"""The last five need two commands, the second of which has words that the first one prints."""


def draw_draft(seed: int | str, number: int, kind: str, split: Split) -> Draft:
    """Generates one task; deterministic."""
    draw = Random(f"{seed}/{number}/{kind}")  # noqa: S311 - not security-relevant
    while (draft := KINDS[kind](Words(draw))).split != split:
        pass
    return draft


def draw_problem(seed: int | str, number: int, kind: str, split: Split = "train") -> Problem:
    """A task as a problem with its solution."""
    draft, id = draw_draft(seed, number, kind, split), f"{kind}-{seed}-{number}"
    calls = (ExpectedCall("shell", {"command": command}, printed) for command, printed in draft.commands)
    task = Task(id, ({"role": "user", "content": draft.request},), columns={"kind": kind})
    return Problem(kind, task, tuple(calls), DONE, lambda _: DONE)


def draw_problems(seed: int | str, kinds: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Problems without end, in turn of each kind; deterministic."""
    order = kinds or tuple(KINDS)
    for number in count():
        yield draw_problem(seed, number, order[number % len(order)])
