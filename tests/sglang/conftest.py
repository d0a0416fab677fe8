"""Two real servers for all tests, reset after each; starting one takes half a minute on a busy machine."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from tests.waiting import is_alive
from trainer.engine.base import AdapterShape
from trainer.engine.sglang.http_client import SGLangClient
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess
from trainer.engine.sglang.weight_sync.adapters import MODULES, AdapterPlan
from trainer.model import load_model

CONTEXT = 512
OPTIONS = ServerOptions(context=CONTEXT, cache_tokens=16384, device="cpu")
LORA_RANK = 4
SPLIT_OPTIONS = replace(
    OPTIONS,
    extra=("--tp", "2", *AdapterPlan("auto", AdapterShape(LORA_RANK, 32.0, tuple(sorted(MODULES)))).server_flags),
)
"""A server of two processes, each of which has a part of the model, and which takes LoRA adapters."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's network with random weights."""
    from mtrl_plugins.demo.facts.facts_demo import build_model

    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(model: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return load_model(model)


@pytest.fixture(scope="session")
async def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    async with started(model, tmp_path_factory.mktemp("first")) as server:
        yield server


@pytest.fixture(scope="session")
async def second(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    """Split over two processes."""
    async with started(model, tmp_path_factory.mktemp("second"), SPLIT_OPTIONS) as server:
        yield server


@pytest.fixture
async def server(first: ServerProcess) -> ServerProcess:
    await reset(first)
    return first


@pytest.fixture
async def servers(first: ServerProcess, second: ServerProcess) -> tuple[ServerProcess, ServerProcess]:
    await reset(first)
    await reset(second)
    return first, second


@asynccontextmanager
async def started(model: Path, folder: Path, options: ServerOptions = OPTIONS) -> AsyncIterator[ServerProcess]:
    async with ServerProcess(model, options, log=folder / "sglang.log", notify=_told) as server:
        yield server


async def reset(server: ServerProcess) -> None:
    """With the weights of its model, whatever was published to it."""
    async with SGLangClient(server.url) as client:
        await client.post("/continue_generation", {})
        if (await client.get("/model_info"))["weight_version"] != "0":
            body = {"model_path": str(server.model), "weight_version": "0", "flush_cache": True}
            await client.post("/update_weights_from_disk", body)


class Lent(ServerProcess):
    """A server that runs, given to an engine as if it were its own: it starts it again, and leaves it running."""

    def __init__(self, lender: ServerProcess) -> None:
        super().__init__(lender.model, lender.options, log=lender.log)
        self._lender, self.url = lender, lender.url

    async def __aenter__(self) -> Lent:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    @property
    def pid(self) -> int | None:
        return self._lender.pid

    @property
    def alive(self) -> bool:
        return self._lender.alive

    async def restart(self) -> None:
        await self._lender.restart()


def group_of(leader: int | None) -> list[int]:
    """All that a server started, itself included."""
    return [pid for pid in psutil.pids() if is_alive(pid) and os.getpgid(pid) == leader]


def _told(line: str) -> None:
    sys.stderr.write(line + "\n")
