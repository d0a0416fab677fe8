"""Bodies of callers that cost too much to parse are refused, and stop nobody else."""

from __future__ import annotations

import pytest

from gateway.gateway import Gateway
from tests.hostile.injector import assert_not_held, freeze_garbage
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import live_server_async

BODIES = {
    "values": (b'{"tool_calls":[' + b"{}," * 2_000_000 + b"{}]}", 413),
    "depth": (b'{"messages":' + b"[" * 90_000 + b"]" * 90_000 + b"}", 400),
}


@pytest.mark.parametrize("trick", BODIES)
async def test_body_with_too_many_values_is_refused_beside_the_loop(trick: str) -> None:
    freeze_garbage()
    async with live_server_async(lambda: Gateway(http_sources())) as server:
        client = ApiClient(server.url)
        body, status = BODIES[trick]
        assert (await client("POST", "/v1/calls", body)).status_code == status
        assert (await client("GET", "/healthz")).status_code == 200
        assert_not_held(server.gateway.loop_watchdog)
