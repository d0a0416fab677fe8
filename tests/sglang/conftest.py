"""One real server for all tests that leave it as it was; a start takes a minute on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from trainer.engine.sglang.server import Options, Server

CONTEXT = 512
OPTIONS = Options(context=CONTEXT, tokens=16384, device="cpu")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's network with random weights."""
    from trainer.demo.model import build

    return build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
async def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "sglang.log"
    async with Server(model, OPTIONS, log=log, told=_told) as server:
        yield server


def _told(line: str) -> None:
    sys.stderr.write(line + "\n")
