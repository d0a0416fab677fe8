"""The trainer's side of the tests: a policy, what it finds, and an engine that has its weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import torch
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.engine.base import Written
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.own import Own
from trainer.engine.sglang.publish.disk import ByDisk
from trainer.engine.sglang.publish.group import ByGroup
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.publish.way import Way
from trainer.engine.sglang.server import Server

AGREE = 1e-5
EOS = 1
PROMPT = tuple(range(40, 80))
WAYS = ("tensors", "disk", "group")


def finds(policy: PreTrainedModel, temperature: float = 1.0) -> Callable[..., list[float]]:
    def read(ids: Sequence[int], _: Sequence[Image] = ()) -> list[float]:
        ids_T = torch.tensor(ids)
        with torch.no_grad():
            logprobs_TV = (policy(ids_T[None]).logits[0] / temperature).log_softmax(-1)
        return [float(value) for value in logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0]]

    return read


def moved(policy: PreTrainedModel, by: float = 0.1) -> None:
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(by * torch.randn(weight.shape, generator=noise))


def way_of(name: str, model: Path) -> Way:
    return {"tensors": ByTensors, "group": ByGroup}[name]() if name != "disk" else ByDisk(model)


@asynccontextmanager
async def opened(
    *servers: Server | str,
    policy: PreTrainedModel,
    way: Way | None = None,
    in_place: bool = False,
    within_s: float = 300,
) -> AsyncIterator[SGLangEngine]:
    """With the policy's weights. Servers are those that run already, lent ones included."""
    given = [server if isinstance(server, str) or type(server) is not Server else server.url for server in servers]
    with anyio.fail_after(300):
        async with SGLangEngine(given, way or ByTensors(), own=Own(finds(policy)), in_place=in_place) as engine:
            await engine.publish(policy.state_dict(), 0)
            yield engine


async def written_on(engine: SGLangEngine, rows: int, over: Callable[[], bool] = lambda: False) -> None:
    """Until servers write so many rows, and some ids of each, as they tell where they are asked; or it is over."""
    begun: int | None = None
    with anyio.fail_after(60):
        while True:
            loads = [(await replica.wire.get("/v1/loads"))["loads"][0] for replica in engine.replicas]
            held = sum(load["num_active_tokens"] for load in loads)
            if over() or (begun is not None and held >= begun + 10 * rows):
                return
            if begun is None and sum(load["num_running_reqs"] for load in loads) >= rows:
                begun = held
            await anyio.sleep(0.005)


def off(policy: PreTrainedModel, asked: Sequence[int], written: Written, temperature: float = 1.0) -> float:
    ours = finds(policy, temperature)((*asked, *written.ids))[len(asked) - 1 :]
    return max(abs(one - other) for one, other in zip(ours, written.logprobs, strict=True))
