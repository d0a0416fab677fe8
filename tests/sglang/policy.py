"""The trainer's side of the tests: a policy, its logprobs, and an engine with its weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import torch
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.engine.base import Generation
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.base import WeightSync
from trainer.engine.sglang.weight_sync.disk import DiskSync
from trainer.engine.sglang.weight_sync.process_group import ProcessGroupSync
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference

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


def way_of(name: str, model: Path) -> WeightSync:
    return {"tensors": TensorSync, "group": ProcessGroupSync}[name]() if name != "disk" else DiskSync(model)


@asynccontextmanager
async def opened(
    *servers: ServerProcess | str,
    policy: PreTrainedModel,
    way: WeightSync | None = None,
    in_place: bool = False,
    within_s: float = 300,
) -> AsyncIterator[SGLangEngine]:
    """With the policy's weights. Servers are those that run already, lent ones included."""
    given = [
        server if isinstance(server, str) or type(server) is not ServerProcess else server.url for server in servers
    ]
    with anyio.fail_after(900):
        async with SGLangEngine(
            given, way or TensorSync(), reference=TrainerReference(finds(policy)), in_place=in_place
        ) as engine:
            await engine.publish(policy.state_dict(), 0)
            yield engine


async def written_on(engine: SGLangEngine, rows: int, over: Callable[[], bool] = lambda: False) -> None:
    """Until servers write so many rows, and some ids of each, as they tell where they are asked; or it is over."""
    begun: int | None = None
    with anyio.fail_after(300):
        while True:
            loads = [(await replica.client.get("/v1/loads"))["loads"][0] for replica in engine.replicas]
            held = sum(load["num_active_tokens"] for load in loads)
            if over() or (begun is not None and held >= begun + 10 * rows):
                return
            if begun is None and sum(load["num_running_reqs"] for load in loads) >= rows:
                begun = held
            await anyio.sleep(0.005)


def off(policy: PreTrainedModel, asked: Sequence[int], written: Generation, temperature: float = 1.0) -> float:
    ours = finds(policy, temperature)((*asked, *written.ids))[len(asked) - 1 :]
    return max(abs(one - other) for one, other in zip(ours, written.logprobs, strict=True))
