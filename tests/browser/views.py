"""`View` and `Stage`: the views of a web UI of which `make screenshots` takes screenshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.browser.page import WIDE, Page


@dataclass(frozen=True)
class View:
    name: str
    """Name of its screenshot."""
    show: Callable[[Page, str], None]
    """Opens the view in an empty page, given the server's URL, and waits until it is drawn."""
    size: tuple[int, int] = WIDE
    in_docs: bool = False
    """Whether the documentation shows its screenshot."""


@dataclass(frozen=True)
class Stage:
    """A server and its views."""

    serve: Callable[[], AbstractContextManager[str]]
    """Starts the server and yields its URL."""
    views: Sequence[View]
