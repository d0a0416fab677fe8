"""What a file got wrong, in words that its owner can act on, and without the values that nobody should see."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.config.entries import FunctionSchema, InteractionEntry, Mcp, ToolSchema, shown
from gateway.config.env import Expansion, Loc, path
from gateway.config.files import FORMS, ServersFile, ToolsFile, WrittenServer, form
from gateway.config.models import ResultLimit, keys
from gateway.errors import ConfigError

SECRET = frozenset({"args", "auth_token", "config", "env", "headers", "url"})
"""Fields whose values may be secrets even where they are written out."""
INNER: dict[str, type[BaseModel]] = {
    "function": FunctionSchema,
    "mcp": Mcp,
    "result_limit": ResultLimit,
    "tool_schema": ToolSchema,
}
FORM_REMEDY = "give it one of `class_name`, `function`, `server`, `mcp`"


def mistakes(
    error: ValidationError, raw: Any, file: Path, expansion: Expansion, model: type[BaseModel] | None = None
) -> list[ConfigError]:
    """Every mistake of one validation; those that a missing variable already explains are left out.

    `model` is what the file should have been, where it is neither of the gateway's own.
    """
    told = _Told(raw, expansion, model or (ServersFile if error.title == ServersFile.__name__ else ToolsFile))
    found = []
    for detail in error.errors(include_url=False):
        loc = told.written(detail["loc"])
        # A rule between fields cannot hold while one of them has no value.
        depth = len(loc) if detail["type"] == "rule" else None
        if not any(missing[:depth] == loc for missing in expansion.mistakes):
            problem, remedy = told.words(detail, loc)
            found.append(ConfigError(problem, file=shown(file), field=path(loc), remedy=remedy))
    return found


class _Told:
    """What the validator says, told to the owner of one file."""

    def __init__(self, raw: Any, expansion: Expansion, model: type[BaseModel]) -> None:
        self.raw, self.expansion, self.model = raw, expansion, model

    def written(self, loc: Loc) -> Loc:
        """A place as the file has it: no name of a form after `tools[0]`, no list around a single interaction."""
        if len(loc) > 2 and loc[0] == "tools" and loc[2] in FORMS:
            return (*loc[:2], *loc[3:])
        if loc[:1] == ("interaction",) and isinstance(at(self.raw, ["interaction"]), dict):
            return (*loc[:1], *loc[2:])
        return loc

    def words(self, detail: ErrorDetails, loc: Loc) -> tuple[str, str]:
        """The problem and its remedy."""
        match detail["type"]:
            case "extra_forbidden":
                return "unknown key", self._unknown(str(loc[-1]), loc[:-1])
            case "missing":
                return "is missing", f"add `{loc[-1]}`"
            case "rule":
                return str(detail["ctx"]["problem"]), str(detail["ctx"]["remedy"])
            case "value_error":
                problem, _, remedy = str(detail["ctx"]["error"]).partition("; ")
                return problem, remedy or (self._remedy(loc, detail) if loc else "")
            case "model_type" | "model_attributes_type" | "dict_type":
                return f"expected a mapping, found {self._seen(loc)}", "write `key: value` pairs there"
            case "union_tag_not_found":
                return "is no tool", _formless(at(self.raw, loc))
            case "string_pattern_mismatch" | "string_too_short":
                importable = loc[-1] in ("class_name", "function", "parse") or "parse_tools" in loc
                remedy = "write `package.module:name`" if importable else "give it a name"
                return f"expected a name, found {self._seen(loc)}", remedy
        wanted = detail["msg"].partition(", unable")[0].replace("Input should be", "expected")
        return f"{wanted}, found {self._seen(loc)}", self._remedy(loc, detail)

    def _remedy(self, loc: Loc, detail: ErrorDetails) -> str:
        if name := self.expansion.origin(loc):
            return f"the value comes from {name}: change it there"
        if detail["type"] == "literal_error":
            return f"write {detail['ctx']['expected']}"
        return f"correct `{path(loc[-1:])}`"

    def _seen(self, loc: Loc) -> str:
        """What stands there, unless it may be a secret."""
        value = at(self.raw, loc)
        kind = {str: "a text", dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value), "a value")
        if name := self.expansion.origin(loc):
            return f"{kind} from {name}"
        if isinstance(value, dict | list) or value is None or SECRET.intersection(loc):
            return kind
        return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."

    def _unknown(self, key: str, owner: Loc) -> str:
        known = self._known(owner)
        if near := nearest(key, known):
            return f"did you mean `{near}`?"
        others = [name for name, model in FORMS.items() if key in keys(model)]
        if owner[:1] == ("tools",) and len(owner) == 2 and others:
            return f"`{key}` goes with {' or '.join(f'`{name}`' for name in others)}; remove it here"
        return f"remove it; known keys: {', '.join(known)}"

    def _known(self, owner: Loc) -> list[str]:
        """The keys that the mapping at a place may have."""
        match owner:
            case ():
                return [*keys(self.model)]
            case ("mcpServers", str()):
                return [*keys(WrittenServer)]
            case ("interaction",) | ("interaction", int()):
                return [*keys(InteractionEntry)]
            case ("tools", int()):
                return [*keys(FORMS[form(at(self.raw, owner)) or "class_name"])]
        return [*keys(INNER.get(str(owner[-1])) or self._inner(owner))]

    def _inner(self, owner: Loc) -> type[BaseModel]:
        """The model of a field of a field; of a list or a mapping, that of what it holds."""
        model, within = self.model, False
        for step in owner:
            if not within:
                annotation = model.model_fields[str(step)].annotation
                model, within = _held(annotation) or model, get_origin(annotation) in (tuple, list, dict)
            else:
                within = False
        return model


def at(raw: Any, loc: Iterable[str | int]) -> Any:
    """The value at a place, None where there is none."""
    for step in loc:
        try:
            raw = raw[step]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def _held(annotation: Any) -> type[BaseModel] | None:
    """The first model in what a field may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _held(inner))), None)


def _formless(entry: Any) -> str:
    for key in entry if isinstance(entry, dict) else ():
        if near := get_close_matches(str(key), FORMS, n=1, cutoff=0.75):
            return f"did you mean `{near[0]}` instead of `{key}`?"
    return FORM_REMEDY


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    folded = {name.lower().replace("_", ""): name for name in known}
    near = get_close_matches(word.lower().replace("_", "").replace("-", ""), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None
