"""A Python function is a tool: its hints are the schema, its docstring the description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from gateway.types import ALONE, Context, Hints, ToolSpec


@dataclass(slots=True)
class SessionContext:
    """What a function learns of the rollout that calls it, when one of its parameters has this type."""

    session_id: str = ""
    task_id: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    """Kept from call to call of one rollout, and thrown away with it."""
    call: Context = ALONE

    async def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        if self.call.progress is not None:
            await self.call.progress(done, total, message)


class FunctionTool:
    """A function with its spec; `bind` turns JSON arguments into what the function's hints promise it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        owner: str = "",
        hints: Hints | None = None,
    ) -> None:
        self.function = function
        self.is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        doc = docstring_parser.parse(inspect.getdoc(function) or "")
        self.context_name, self._model = _model(function, {p.arg_name: p.description or "" for p in doc.params})
        self.spec = ToolSpec(
            name=name or str(getattr(function, "__name__", type(function).__name__)),
            description=description if description is not None else _description(doc),
            parameters=parameters if parameters is not None else _schema(self._model),
            hints=hints or Hints(),
            owner=owner,
        )

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments in Python's own kinds; raises ValueError with what the policy got wrong."""
        try:
            bound = self._model.model_validate(arguments)
        except ValidationError as error:
            raise ValueError(_mend(error)) from error
        extra = bound.model_extra or {}
        return {name: getattr(bound, name) for name in bound.model_fields_set if name not in extra} | extra


def _model(function: Callable[..., Any], described: Mapping[str, str]) -> tuple[str | None, type[BaseModel]]:
    """The parameters as a pydantic model, and the name of the one that takes the context."""
    hints = get_type_hints(function, include_extras=True)
    context_name = None
    fields: dict[str, Any] = {}
    extra = "forbid"
    for parameter in inspect.signature(function).parameters.values():
        if hints.get(parameter.name) is SessionContext:
            context_name = parameter.name
        elif parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{parameter} has no name that a caller could use; give it one, or remove it")
        else:
            fields[parameter.name] = _field(parameter, hints, described)
    config = ConfigDict(extra=extra, arbitrary_types_allowed=False, protected_namespaces=())  # type: ignore[typeddict-item]
    return context_name, create_model("Arguments", __config__=config, **fields)


def _field(parameter: inspect.Parameter, hints: Mapping[str, Any], described: Mapping[str, str]) -> tuple[Any, Any]:
    default = ... if parameter.default is parameter.empty else parameter.default
    description = described.get(parameter.name) or None
    return hints.get(parameter.name, Any), Field(default, description=description)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """pydantic's schema without the titles it makes up, which cost tokens and say nothing."""
    schema: dict[str, Any] = _without_titles(model.model_json_schema())
    schema.setdefault("properties", {})
    return schema


def _without_titles(node: Any, *, names: bool = False) -> Any:
    """`names` is true where the keys are a user's own words, so that a field called `title` survives."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value, names=key in ("properties", "$defs") and not names)
        for key, value in node.items()
        if names or key != "title"
    }


def _description(doc: docstring_parser.Docstring) -> str:
    parts = [doc.short_description, doc.long_description]
    text = "\n\n".join(part for part in parts if part)
    returns = doc.returns.description if doc.returns else None
    return f"{text}\n\nReturns: {returns}" if text and returns else text


def _mend(error: ValidationError) -> str:
    lines = [f"- {'.'.join(str(step) for step in one['loc'])}: {one['msg']}" for one in error.errors()[:5]]
    return "The arguments do not fit the tool:\n" + "\n".join(lines)
