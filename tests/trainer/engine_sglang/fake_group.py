"""A fake server in a process group: gloo between threads of this process."""

from __future__ import annotations

from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from anyio import to_thread
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from tests.trainer.engine_sglang.fake_sglang import Fake

WAIT = timedelta(seconds=3)


class Grouped(Fake):
    gloo: Any = None

    async def join(self, body: Any) -> Any:
        self.gloo = await to_thread.run_sync(_joined, body)
        return await self.nothing(body)

    async def from_group(self, body: Any) -> Any:
        assert body["load_format"] == "flattened_bucket"
        places, size = dict[str, tuple[int, int, torch.dtype, list[int]]](), 0
        for name, shape, dtype in zip(body["names"], body["shapes"], body["dtypes"], strict=True):
            kind = getattr(torch, dtype)
            assert size % kind.itemsize == 0, "SGLang refuses a tensor that does not begin at a multiple of its width"
            places[name] = (size, size + prod(shape) * kind.itemsize, kind, shape)
            size = places[name][1]
        data = torch.empty(size, dtype=torch.uint8)
        try:
            await to_thread.run_sync(self._heard, data)
        except RuntimeError as error:
            return {"success": False, "message": str(error)}
        named = {name: data[a:b].view(kind).reshape(shape) for name, (a, b, kind, shape) in places.items()}
        return self._took(named, {"weight_version": self.version} | body)

    async def leave(self, body: Any) -> Any:
        self.gloo = None
        return await self.nothing(body)

    def _heard(self, data: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.gloo.broadcast([data], options).wait(WAIT)


def _joined(body: Any) -> Any:
    """Without torch's list of groups, in which the trainer's has this name already."""
    name, size, rank = body["group_name"], body["world_size"], body["rank_offset"]
    store = TCPStore(body["master_address"], body["master_port"], size, is_master=False, timeout=WAIT)
    for prefix in (name, f"{name}/", "cpu/"):
        store = c10d.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, rank, size, WAIT)  # type: ignore[attr-defined]
