"""Fixtures: one server for all tests of a file; tests with other settings start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.gateway import Gateway
from gateway.native.function import FunctionTool
from tests.http.api_client import ApiClient, HangingTool, http_sources
from tests.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def hanging() -> HangingTool:
    return HangingTool()


@pytest.fixture(scope="module")
def server(hanging: HangingTool) -> Iterator[LiveServer]:
    with live_server(lambda: Gateway(http_sources(FunctionTool(hanging.hang, owner="rooms")))) as served:
        yield served


@pytest.fixture
def client(server: LiveServer, hanging: HangingTool) -> ApiClient:
    hanging.started.clear()
    hanging.cancelled.clear()
    return ApiClient(server.url)
