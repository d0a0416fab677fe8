"""A view is a place on a page, and how a person gets there; `make screenshots` has a picture made of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.browser.page import WIDE, Page


@dataclass(frozen=True)
class View:
    name: str
    """Of its picture."""
    show: Callable[[Page, str], None]
    """Brings an empty page there, given the address of what is served, and waits until all is drawn."""
    size: tuple[int, int] = WIDE
    kept: bool = False
    """Its picture is shown in the README."""


@dataclass(frozen=True)
class Stage:
    """What is served while pictures are made of its views."""

    serve: Callable[[], AbstractContextManager[str]]
    """Gives the address."""
    views: Sequence[View]
