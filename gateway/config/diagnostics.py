"""Turns validation errors of configuration files into `ConfigError`s with line, problem and remedy, without secrets.

The line is found by parsing the file again, only when there is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.config.base import FrozenModel, file_keys
from gateway.config.entries import FunctionSchema, InteractionEntry, Mcp, ToolSchema, display_path
from gateway.config.environment import Expansion, Loc, format_loc
from gateway.config.file_forms import FORMS, ServerSection, ServersFile, ToolsFile, entry_form
from gateway.config.json_comments import blank_json_comments
from gateway.config.models import ResultLimit
from gateway.config.server_auth import OAuth
from gateway.errors import ConfigError

LOCATABLE_SUFFIXES = (".yaml", ".yml", ".json", ".jsonc")
MAX_BYTES = 1024 * 1024
"""Maximum size of a configuration file."""
OWNER_PATTERN = re.compile(r"(?P<file>.+\.(?:yaml|yml|jsonc?)) (?P<field>\S.*)")
"""An entry's name in messages: its file and the field in it."""
STEP_PATTERN = re.compile(r"\[(?P<place>\d+)\]|\[(?P<quote>['\"])(?P<quoted>.*?)(?P=quote)\]|\.?(?P<name>[\w$@/-]+)")


def locate_field(file: object, field: str) -> tuple[str, str, int] | None:
    """The file, the field, and the line of the field, or of the nearest enclosing field that has one."""
    owner = OWNER_PATTERN.fullmatch(str(file))
    name, full_field = (owner["file"], f"{owner['field']}.{field}".rstrip(".")) if owner else (str(file), field)
    matches = STEP_PATTERN.finditer(full_field)
    steps = [int(match["place"]) if match["place"] else match["quoted"] or match["name"] or "" for match in matches]
    if not name.endswith(LOCATABLE_SUFFIXES) or not steps:
        return None
    try:
        with open(name, "rb") as stream:
            text = stream.read(MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError):
        return None
    if not name.endswith((".yaml", ".yml")):
        text = blank_json_comments(text)
    line = _find_line(_compose_yaml(text), steps)
    return None if line is None else (name, full_field, line)


@lru_cache(maxsize=4)
def _compose_yaml(text: str) -> Any:
    """The text as YAML nodes with line numbers. JSON is YAML, apart from tabs."""
    try:
        return yaml.compose(text.replace("\t", " "), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def _find_line(node: Any, steps: list[str | int]) -> int | None:
    line = None
    for step in steps:
        kind = getattr(node, "id", None)
        if kind == "sequence" and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        elif kind == "mapping" and step == 0:
            continue  # A single interaction needs no list around it.
        elif kind == "mapping":
            pair = next((pair for pair in node.value if pair[0].value == step), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        else:
            break
    return line


SECRET_FIELDS = frozenset({"answers", "args", "auth_command", "auth_token", "config", "env", "headers", "oauth", "url"})
"""Fields whose values may be secrets even if written out in the file."""
NESTED_MODELS: dict[str, type[BaseModel]] = {
    "function": FunctionSchema,
    "mcp": Mcp,
    "oauth": OAuth,
    "result_limit": ResultLimit,
    "tool_schema": ToolSchema,
}
ALTERNATIVE = re.compile(r"(?:function-\w+|literal|tuple|list)\[")
"""How pydantic calls an alternative of a field in an error's location."""
FORM_REMEDY = "give it one of `class_name`, `function`, `server`, `mcp`"


def explain_validation_error(
    error: ValidationError, raw: Any, file: Path, expansion: Expansion, model: type[BaseModel] | None = None
) -> list[ConfigError]:
    """The errors of one validation, without those caused by a missing environment variable.

    `model` is the file's model, if it is neither of the gateway's own.
    """
    explainer = _Explainer(raw, expansion, model or (ServersFile if error.title == ServersFile.__name__ else ToolsFile))
    errors = []
    for detail in error.errors(include_url=False):
        loc = explainer.location_in_file(detail["loc"])
        if any(str(step).startswith("literal[") for step in detail["loc"][-1:]) and isinstance(
            value_at(raw, loc), dict
        ):
            continue  # It may be a word or a mapping, and it is a mapping with a mistake of its own.
        # A rule between fields fails as well if one of them has no value.
        depth = len(loc) if detail["type"] == "rule" else None
        if not any(missing[:depth] == loc for missing in expansion.errors):
            problem, remedy = explainer.explain(detail, loc)
            field = format_loc(expansion.location_in_file(loc))
            errors.append(ConfigError(problem, file=display_path(file), field=field, remedy=remedy))
    return errors


class _Explainer:
    """Explains pydantic's errors to the author of one file."""

    def __init__(self, raw: Any, expansion: Expansion, model: type[BaseModel]) -> None:
        self.raw, self.expansion, self.model = raw, expansion, model

    def location_in_file(self, loc: Loc) -> Loc:
        """The location in the file, without pydantic's tags of alternatives and the list around one interaction."""
        loc = tuple(step for step in loc if not ALTERNATIVE.match(str(step)))
        if len(loc) > 2 and loc[0] == "tools" and loc[2] in FORMS:
            return (*loc[:2], *loc[3:])
        if loc[:1] == ("interaction",) and isinstance(value_at(self.raw, ["interaction"]), dict):
            return (*loc[:1], *loc[2:])
        return loc

    def explain(self, detail: ErrorDetails, loc: Loc) -> tuple[str, str]:
        """The problem and the remedy of one error."""
        match detail["type"]:
            case "extra_forbidden":
                return "unknown key", self._unknown_key_remedy(str(loc[-1]), loc[:-1])
            case "missing":
                return "is missing", f"add `{loc[-1]}`"
            case "rule":
                return str(detail["ctx"]["problem"]), str(detail["ctx"]["remedy"])
            case "value_error":
                problem, _, remedy = str(detail["ctx"]["error"]).partition("; ")
                return problem, remedy or (self._remedy(loc, detail) if loc else "")
            case "model_type" | "model_attributes_type" | "dict_type":
                return f"expected a mapping, found {self._describe_value(loc)}", "write `key: value` pairs there"
            case "tuple_type" | "list_type":
                return f"expected a list, found {self._describe_value(loc)}", f"write `{loc[-1]}: [...]`"
            case "union_tag_not_found":
                return "is not a tool", _missing_form_remedy(value_at(self.raw, loc))
            case "string_pattern_mismatch" if loc[-1] == "[key]":
                problem = f"{loc[-2]!r} is not a name that can be used here"
                return problem, f"rename it; names match {detail['ctx']['pattern']}"
            case "string_pattern_mismatch" | "string_too_short":
                importable = loc[-1] in ("class_name", "function", "parse") or "parse_tools" in loc
                remedy = "write `package.module:name`" if importable else "give it a name"
                return f"expected a name, found {self._describe_value(loc)}", remedy
        expected = detail["msg"].partition(", unable")[0].replace("Input should be", "expected")
        return f"{expected}, found {self._describe_value(loc)}", self._remedy(loc, detail)

    def _remedy(self, loc: Loc, detail: ErrorDetails) -> str:
        if name := self.expansion.variable_at(loc):
            return f"the value comes from {name}: change it there"
        if detail["type"] == "literal_error":
            return f"write {detail['ctx']['expected']}"
        default = self._default_at(loc)
        rest = f", or leave it out: it is then {default}" if isinstance(default, int | float | str) and default else ""
        return f"correct `{format_loc(self.expansion.location_in_file(loc)[-1:])}`{rest}"

    def _default_at(self, loc: Loc) -> Any:
        """The default of the setting at a location of a run file."""
        if self.model in (ToolsFile, ServersFile):
            return None
        try:
            field = self._nested_model(loc[:-1]).model_fields.get(str(loc[-1]))
        except (KeyError, IndexError):  # Within a value that has no settings of its own.
            return None
        return field.default if field is not None else None

    def _describe_value(self, loc: Loc) -> str:
        """The value, or only its kind if it may be a secret."""
        value = value_at(self.raw, loc)
        kind = {str: "a text", dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value), "a value")
        if name := self.expansion.variable_at(loc):
            return f"{kind} from {name}"
        if isinstance(value, dict | list) or value is None or SECRET_FIELDS.intersection(loc):
            return kind
        return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."

    def _unknown_key_remedy(self, key: str, owner: Loc) -> str:
        known = self._known_keys(owner)
        near = self.expansion.suggest_key(key) if owner[:1] == ("mcpServers",) else None
        if near := near or closest_match(key, known):
            return f"did you mean `{near}`?"
        others = [name for name, model in FORMS.items() if key in file_keys(model)]
        if owner[:1] == ("tools",) and len(owner) == 2 and others:
            return f"`{key}` goes with {' or '.join(f'`{name}`' for name in others)}; remove it here"
        return f"remove it; known keys: {', '.join(known)}"

    def _known_keys(self, owner: Loc) -> list[str]:
        """The keys allowed in the mapping at a location."""
        match owner:
            case ():
                return [*file_keys(self.model)]
            case ("mcpServers", str()):
                return [*file_keys(ServerSection)]
            case ("interaction",) | ("interaction", int()):
                return [*file_keys(InteractionEntry)]
            case ("tools", int()):
                return [*file_keys(FORMS[entry_form(value_at(self.raw, owner)) or "class_name"])]
        return [*file_keys(NESTED_MODELS.get(str(owner[-1])) or self._nested_model(owner))]

    def _nested_model(self, owner: Loc) -> type[BaseModel]:
        """The model of a nested field; for a list or mapping, the model of its items."""
        model, within = self.model, False
        for depth, step in enumerate(owner, 1):
            if not within:
                annotation = model.model_fields[str(step)].annotation
                model, within = _first_model(annotation) or model, get_origin(annotation) in (tuple, list, dict)
                if issubclass(model, FrozenModel) and not within:
                    model = model.kind_of(value_at(self.raw, owner[:depth]))
            else:
                within = False
        return model


def value_at(raw: Any, loc: Iterable[str | int]) -> Any:
    """The value at a location, None if there is none."""
    for step in loc:
        try:
            raw = raw[step]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def _first_model(annotation: Any) -> type[BaseModel] | None:
    """The first model in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _first_model(inner))), None)


def _missing_form_remedy(entry: Any) -> str:
    for key in entry if isinstance(entry, dict) else ():
        if near := get_close_matches(str(key), FORMS, n=1, cutoff=0.75):
            return f"did you mean `{near[0]}` instead of `{key}`?"
    return FORM_REMEDY


def closest_match(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if any is similar."""
    folded = {name.lower().replace("_", ""): name for name in known}
    near = get_close_matches(word.lower().replace("_", "").replace("-", ""), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None
