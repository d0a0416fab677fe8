"""Sections that plug-ins add to a file's settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Optional

from pydantic import Field, create_model

from gateway.config.base import FrozenModel
from gateway.plugins import Plugin, find_all, load_name


def make_sections(name: str, select: Callable[[Plugin], Mapping[str, str]]) -> type[FrozenModel]:
    """A base class of settings with a field for each section that plug-ins add; each is None if a file has it not."""
    fields: dict[str, Any] = {}
    for key, target in find_all(select).items():
        kind = load_name(target)
        fields[key] = (Optional[kind], Field(None, description=inspect.getdoc(kind)))  # noqa: UP045 - may be no class
    return create_model(name, __base__=FrozenModel, **fields)
