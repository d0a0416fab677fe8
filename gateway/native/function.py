"""Tools that are Python functions: the type hints become the JSON Schema, the docstring the description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

import docstring_parser
import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, create_model

from gateway.types import DEFAULT_CONTEXT, Context, Hints, ToolSpec


@dataclass(slots=True)
class SessionContext:
    """The calling rollout, for functions that have a parameter of this type."""

    session_id: str = ""
    task_id: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    """Shared by all calls of one rollout, and dropped at its end."""
    call: Context = DEFAULT_CONTEXT

    async def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Reports progress to the caller, if it listens."""
        if self.call.on_progress is not None:
            await self.call.on_progress(done, total, message)


class FunctionPath(NamedTuple):
    """Where a function is, so that another process can import it."""

    name: str
    """`package.module:name`."""
    file: Path | None = None
    """The file that names it, whose folder is importable."""


class FunctionTool:
    """A function with its spec; `bind` validates JSON arguments and converts them to the hinted types."""

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
        self.process: FunctionPath | None = None
        """Where a child process finds the function, if it is to run in one rather than in a thread."""
        unwrapped = inspect.unwrap(function)
        if inspect.isgeneratorfunction(unwrapped) or inspect.isasyncgenfunction(unwrapped):
            raise TypeError("it is a generator function (`yield`), which makes no result: return a list of its items")
        self.is_async = inspect.iscoroutinefunction(unwrapped)
        doc = docstring_parser.parse(inspect.getdoc(function) or "")
        descriptions = {param.arg_name: param.description or "" for param in doc.params}
        self.context_parameter, self._model = _build_arguments_model(function, descriptions)
        self.spec = ToolSpec(
            name=name or str(getattr(function, "__name__", type(function).__name__)),
            description=description if description is not None else _format_description(doc),
            parameters=parameters if parameters is not None else _json_schema(self._model),
            hints=hints or Hints(),
            owner=owner,
        )

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the function; raises ValueError with a text for the policy."""
        try:
            bound = self._model.__pydantic_validator__.validate_python(arguments)
        except ValidationError as error:
            raise ValueError(_format_validation_error(error)) from error
        given, values, extra = bound.__pydantic_fields_set__, bound.__dict__, bound.__pydantic_extra__
        kwargs = values if values.keys() <= given else {name: values[name] for name in values if name in given}
        return {**kwargs, **extra} if extra else kwargs


def _build_arguments_model(
    function: Callable[..., Any], descriptions: Mapping[str, str]
) -> tuple[str | None, type[BaseModel]]:
    """The name of the parameter of type SessionContext, and the other parameters as a pydantic model."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"a type hint of {getattr(function, '__name__', 'a tool')} names something unknown: {error}"
        ) from None
    context_parameter = None
    fields: dict[str, Any] = {}
    extra = "forbid"
    for parameter in inspect.signature(function).parameters.values():
        if hints.get(parameter.name) is SessionContext:
            context_parameter = parameter.name
        elif parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(f"parameter `{parameter}` of a tool cannot be passed by name: give it a name, or remove it")
        else:
            fields[parameter.name] = _make_field(parameter, hints, descriptions)
            _check_has_schema(parameter, fields[parameter.name])
    config = ConfigDict(extra=extra, arbitrary_types_allowed=False, protected_namespaces=())  # type: ignore[typeddict-item]
    return context_parameter, create_model("Arguments", __config__=config, **fields)


def _check_has_schema(parameter: inspect.Parameter, field: tuple[Any, Any]) -> None:
    """Raises TypeError, with the parameter's name, for a type that JSON cannot express."""
    try:
        TypeAdapter(field[0]).json_schema()
    except PydanticUserError as error:
        reason = str(error).splitlines()[0]
        raise TypeError(
            f"parameter `{parameter}` has no JSON Schema: {reason} Use a JSON type, Enum, Literal, dataclass, "
            "pydantic model or `typing_extensions.TypedDict`"
        ) from None


def _make_field(
    parameter: inspect.Parameter, hints: Mapping[str, Any], descriptions: Mapping[str, str]
) -> tuple[Any, Any]:
    default = ... if parameter.default is parameter.empty else parameter.default
    description = descriptions.get(parameter.name) or None
    return _as_known_to_pydantic(hints.get(parameter.name, Any)), Field(default, description=description)


def _as_known_to_pydantic(hint: Any) -> Any:
    """The hint with TypedDicts of `typing_extensions`, since pydantic takes no others before Python 3.12."""
    if is_typeddict(hint):
        fields = get_type_hints(hint, include_extras=True)
        typed = {
            name: (Required if name in hint.__required_keys__ else NotRequired)[_as_known_to_pydantic(kind)]
            for name, kind in fields.items()
        }
        return typing_extensions.TypedDict(hint.__name__, typed)  # type: ignore[operator]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin not in (list, dict, set, tuple, Union, UnionType):
        return hint
    known = tuple(map(_as_known_to_pydantic, arguments))
    return hint if known == arguments else (Union if origin is UnionType else origin)[known]


def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """pydantic's schema without its generated titles, which cost tokens and carry no information."""
    schema: dict[str, Any] = _without_titles(model.model_json_schema())
    schema.setdefault("properties", {})
    return schema


def _without_titles(node: Any, *, keys_are_names: bool = False) -> Any:
    """`keys_are_names`: the keys are names of fields, so that a field called `title` stays."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value, keys_are_names=key in ("properties", "$defs") and not keys_are_names)
        for key, value in node.items()
        if keys_are_names or key != "title"
    }


def _format_description(doc: docstring_parser.Docstring) -> str:
    parts = [doc.short_description, doc.long_description]
    text = "\n\n".join(part for part in parts if part)
    returns = doc.returns.description if doc.returns else None
    return f"{text}\n\nReturns: {returns}" if text and returns else text


def _format_validation_error(error: ValidationError) -> str:
    lines = [f"- {'.'.join(str(step) for step in detail['loc'])}: {detail['msg']}" for detail in error.errors()[:5]]
    return "The arguments do not fit the tool:\n" + "\n".join(lines)
