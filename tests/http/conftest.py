"""One server for all tests of a file; those that change its settings start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.gateway import Gateway
from gateway.native.function import FunctionTool
from tests.http.rooms import Caller, Watched, rooms
from tests.served import Served, serving


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched()


@pytest.fixture(scope="module")
def at(watched: Watched) -> Iterator[Served]:
    with serving(lambda: Gateway(rooms(FunctionTool(watched.hang, owner="rooms")))) as served:
        yield served


@pytest.fixture
def ask(at: Served, watched: Watched) -> Caller:
    watched.started.clear()
    watched.cancelled.clear()
    return Caller(at.url)
