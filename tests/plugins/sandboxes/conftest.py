"""Fixtures of the other providers' tests: an engine of containers, and a server of sandboxes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from anyio import from_thread
from pydantic import SecretStr

from gateway.http.settings import Settings
from gateway.http.uvicorn_server import StopSignal
from gateway.process.reaper import Reaper
from gateway.sandbox.host_rules import HostRules
from gateway.sandbox.sandbox_settings import SandboxSettings
from mtrl_plugins.sandboxes.sandbox_server import SandboxServer, serving

TOKEN, MOST, LEASE_S = "a-token-of-the-tests", 2, 1.0
ALLOWED = ("pypi.org", "*.example.org:8443", "10.0.0.5:8080")
ENGINE = str(Path(__file__).with_name("container_engine.py"))


@pytest.fixture
def engine(tmp_path: Path) -> SandboxSettings:
    container = {"image": "an-image", "engine": f"{sys.executable} {ENGINE} {tmp_path}", "python": sys.executable}
    values = {"env": {"TOKEN": "s3cret"}, "memory_mb": 100, "processes": 12, "container": container}
    return SandboxSettings.model_validate(values)


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    reaper = Reaper()
    yield reaper
    with anyio.CancelScope(shield=True):
        await reaper.stop()


Served = tuple[SandboxSettings, SandboxServer]


@pytest.fixture
def server() -> Iterator[Served]:
    """A server of sandboxes with an event loop of its own, since it needs asyncio; and the settings that lead to it."""
    http = Settings(port=0, token=SecretStr(TOKEN))
    with from_thread.start_blocking_portal("asyncio") as portal:
        context = portal.wrap_async_context_manager(
            serving(http, MOST, LEASE_S, portal.call(StopSignal), allowed_hosts=HostRules(ALLOWED))
        )
        with context as (url, running):
            yield SandboxSettings.model_validate({"remote": {"url": url, "token": TOKEN}}), running
