"""The base of all configuration models, and the error of a broken rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

PRINTABLE_TYPES = (bool, int, float, BaseModel, type(None))


class FrozenModel(BaseModel):
    """Base of all configuration models: immutable, unknown keys are refused, values stay out of error messages."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        # Every wait needs a finite deadline.
        allow_inf_nan=False,
        hide_input_in_errors=True,
        validate_by_name=True,
        validate_by_alias=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_keys(cls, data: Any) -> Any:
        """Treats a known key without a value (`tool_schema:`) as left out."""
        if not isinstance(data, dict):
            return data
        known = file_keys(cls)
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @classmethod
    def kind_of(cls, value: object) -> type[BaseModel]:
        """The model that reads a value: this one, unless the value names one of several."""
        return cls

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some values changed, unchecked but for their names: pydantic adds unknown ones in silence."""
        if self.model_config.get("extra") == "forbid" and (unknown := {*(update or ())} - {*type(self).model_fields}):
            raise AttributeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Strings are left out, because any of them may come from the environment.
        given = ((name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set)
        return [(name, value) for name, value in given if isinstance(value, PRINTABLE_TYPES)]


def file_keys(model: type[BaseModel]) -> dict[str, str]:
    """The keys of a file, each with the field that it sets."""
    return {field.alias or name: name for name, field in model.model_fields.items()}


def rule_error(problem: str, remedy: str) -> PydanticCustomError:
    """The error for a broken rule; its text contains no values of the file."""
    return PydanticCustomError("rule", "{problem}", {"problem": problem, "remedy": remedy})
