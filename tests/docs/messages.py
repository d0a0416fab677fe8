"""Collects the texts of errors from the code, as a reader of the documentation would search for them.

A text is what is written in the source: each hole of an f-string stands as `…`. Every call of one of the project's own
exceptions counts, and of every function that passes its `problem` or `remedy` on to one. Names are followed within a
function, branch by branch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from tests.docs.blocks import ROOT

PACKAGES = ("gateway", "trainer")
HOLE = "…"
MOST_ALTERNATIVES = 12
PROBLEM, REMEDY = ("problem", "message", "what", "text", "reason"), "remedy"
"""What parameters are called that take a text."""
VALIDATORS = re.compile(r"(settings|models|entries|curriculum)\.py$")
"""Files whose `ValueError` becomes an error of the configuration."""
NOT_SHOWN = frozenset(
    {
        "ClientDisconnected",
        "JsonDepthError",
        "JsonLimitError",
        "Late",
        "MalformedCall",
        "RolloutOver",
        "UnreadableMessageError",
    }
)
"""Exceptions that a user never reads: the policy is answered with them, or they are caught."""
NOT_SHOWN_FILES = ("trainer/engine/scripted.py",)

GOOD = ("ok", True)
"""Grades of findings that are no trouble."""

Names = dict[str, list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef
"""Either kind."""


@dataclass(frozen=True, order=True)
class Message:
    """One text, and its remedy where it has one of its own."""

    module: str
    line: int
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Source:
    """A parsed module."""

    module: str
    tree: ast.Module


@cache
def sources() -> tuple[Source, ...]:
    """All modules of the packages."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return tuple(
        Source(file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))) for file in files
    )


def texts_of(node: ast.AST | None, names: Mapping[str, list[str]]) -> list[str]:
    """The texts that an expression may have; a hole where that is not known."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return _concatenate([texts_of(part, names) for part in parts])
        case ast.FormattedValue(value=value) if isinstance(value, ast.Name | ast.IfExp):
            return texts_of(value, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _concatenate([texts_of(left, names), texts_of(right, names)])
        case ast.IfExp(body=body, orelse=other):
            return [*texts_of(body, names), *texts_of(other, names)][:MOST_ALTERNATIVES]
        case ast.BoolOp(values=values):
            return [text for value in values for text in texts_of(value, names)][:MOST_ALTERNATIVES]
        case ast.Name(id=name):
            return names.get(name, [HOLE])
        case _:
            return [HOLE]


def _concatenate(parts: Sequence[list[str]]) -> list[str]:
    count = 1
    for part in parts:
        count *= len(part)
    if count > MOST_ALTERNATIVES:
        parts = [part if len(part) == 1 else [HOLE] for part in parts]
    return ["".join(combined) for combined in product(*parts)]


@cache
def definitions() -> tuple[tuple[str, ast.ClassDef | Function], ...]:
    """Every class and function, with its module."""
    wanted = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(
        (source.module, node) for source in sources() for node in ast.walk(source.tree) if isinstance(node, wanted)
    )


@cache
def error_classes() -> frozenset[str]:
    """The project's exceptions, by name."""
    classes = [node for _, node in definitions() if isinstance(node, ast.ClassDef)]
    bases = {node.name: {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases} for node in classes}
    errors = {name for name, parents in bases.items() if any(item.endswith(("Error", "Exception")) for item in parents)}
    while more := {name for name, parents in bases.items() if parents & errors} - errors:
        errors |= more
    return frozenset(name for name in errors - NOT_SHOWN if not name.startswith("_"))


@cache
def signatures() -> dict[tuple[str, str], list[str]]:
    """The parameters of every function and class, by module and name; without a module, of the first of that name."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, node in definitions():
        inits = [item for item in node.body if isinstance(item, Function) and item.name == "__init__"]
        if isinstance(node, ast.ClassDef):
            parameters = _parameters(inits[0]) if inits else _fields(node)
        else:
            parameters = _parameters(node)
        if parameters and node.name != "__init__":
            found.setdefault((module, node.name), parameters)
            found.setdefault(("", node.name), parameters)
    return found


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]  # fmt: skip


def _parameters(function: Function) -> list[str]:
    names = [item.arg for item in function.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


@cache
def reporters() -> frozenset[str]:
    """The exceptions, classes of findings with a remedy, and the functions that pass either on to one of these."""
    classes = [node for _, node in definitions() if isinstance(node, ast.ClassDef)]
    found = set(error_classes()) | {node.name for node in classes if REMEDY in _fields(node)}
    functions = [node for _, node in definitions() if isinstance(node, Function) and node.name != "__init__"]
    passing = [(node.name, _passes_to(node)) for node in functions]
    while more := {name for name, callees in passing if callees & found} - found:
        found |= more
    return frozenset(found)


def _passes_to(function: Function) -> frozenset[str]:
    """What a function gives a text of its own parameters."""
    takes = {item.arg for item in [*function.args.args, *function.args.kwonlyargs]} & {*PROBLEM, REMEDY}
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)] if takes else []
    return frozenset(
        callee(call)
        for call in calls
        for value in [*call.args, *(item.value for item in call.keywords)]
        if any(isinstance(node, ast.Name) and node.id in takes for node in ast.walk(value))
    )


def callee(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@cache
def messages() -> tuple[Message, ...]:
    """Every text of an error that a user may read, in the order of the code."""
    found: dict[tuple[str, str], Message] = {}
    for source in sources():
        if source.module in NOT_SHOWN_FILES:
            continue
        for call, names in _calls(source.tree.body, {}):
            for text, remedy in _report(call, names, source.module):
                known = found.get((source.module, text))
                if known is None or (remedy and not known.remedy):
                    found[source.module, text] = Message(source.module, call.lineno, text, remedy)
                elif remedy and remedy not in known.remedy.split(" / "):
                    merged = Message(source.module, known.line, text, f"{known.remedy} / {remedy}")
                    found[source.module, text] = merged
    return tuple(sorted(found.values()))


def _calls(body: Sequence[ast.stmt], names: Names) -> Iterator[tuple[ast.Call, Names]]:
    """Every call below these statements, with what names stand for there. Changes `names`."""
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            yield from _calls(statement.body, dict(names))
            continue
        blocks = list(_blocks(statement))
        inner = {id(node) for block in blocks for item in block for node in ast.walk(item)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and id(node) not in inner:
                yield node, names
        _assign(statement, names)
        after: list[Names] = []
        for block in blocks:
            branch = dict(names)
            yield from _calls(block, branch)
            if not isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
                after.append(branch)
        _merge(names, after)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
        yield part.body


def _assign(statement: ast.stmt, names: Names) -> None:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        pairs: list[tuple[ast.expr, ast.expr]] = [(statement.target, statement.value)]
    elif isinstance(statement, ast.Assign):
        pairs = [(target, statement.value) for target in statement.targets]
    else:
        return
    for target, value in pairs:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs += zip(target.elts, value.elts, strict=False)
        elif isinstance(target, ast.Name):
            names[target.id] = texts_of(value, names)


def _merge(names: Names, branches: Sequence[Names]) -> None:
    for name in {name for branch in branches for name in branch}:
        texts = [text for item in [names, *branches] for text in item.get(name, [])]
        names[name] = list(dict.fromkeys(texts))[:MOST_ALTERNATIVES]


def _report(node: ast.Call, names: Names, module: str) -> Iterator[tuple[str, str]]:
    name = callee(node)
    if name == "ValueError" and VALIDATORS.search(module):
        parameters = [PROBLEM[0]]
    elif name in reporters():
        parameters = signatures().get((module, name)) or signatures().get(("", name)) or [PROBLEM[0]]
    else:
        return
    arguments = dict(zip(parameters, node.args, strict=False)) | {
        item.arg: item.value for item in node.keywords if item.arg
    }
    if any(isinstance(item, ast.Constant) and item.value in GOOD for item in map(arguments.get, ("grade", "ok"))):
        return
    problems = [text for key in PROBLEM if key in arguments for text in texts_of(arguments[key], names)]
    remedies = texts_of(arguments.get(REMEDY), names)
    for place, text in enumerate(problems):
        chosen = [remedies[place]] if len(remedies) == len(problems) else remedies
        for remedy in chosen:
            problem, _, own = text.partition("\n  remedy: ")
            if _says(problem):
                yield _flatten(problem), _flatten(own or remedy) if _says(own or remedy) else ""


def _says(text: str) -> bool:
    """Whether enough of it is known to be searched for."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 2 and not re.search(r" (?:of|it|by)$", text)


def _flatten(text: str) -> str:
    return re.sub(rf"{HOLE}(?:\s*{HOLE})+", HOLE, " ".join(text.split()))


def file_of(module: str) -> Path:
    """Where a module stands."""
    return ROOT / module


if __name__ == "__main__":
    for item in messages():
        print(f"{item.module}:{item.line}: {item.text}  ->  {item.remedy}")  # noqa: T201
