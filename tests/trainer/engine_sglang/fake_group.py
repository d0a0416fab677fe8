"""A fake server in a process group: gloo between threads of this process."""

from __future__ import annotations

from datetime import timedelta
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
        named = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, shape, dtype in zip(body["names"], body["shapes"], body["dtypes"], strict=True)
        }
        try:
            await to_thread.run_sync(self._heard, list(named.values()))
        except RuntimeError as error:
            return {"success": False, "message": str(error)}
        return self._took(named, {"weight_version": self.version} | body)

    async def leave(self, body: Any) -> Any:
        self.gloo = None
        return await self.nothing(body)

    def _heard(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self.gloo.broadcast([tensor], options).wait(WAIT)


def _joined(body: Any) -> Any:
    """Without torch's list of groups, in which the trainer's has this name already."""
    name, size, rank = body["group_name"], body["world_size"], body["rank_offset"]
    store = TCPStore(body["master_address"], body["master_port"], size, is_master=False, timeout=WAIT)
    for prefix in (name, f"{name}/", "cpu/"):
        store = c10d.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, rank, size, WAIT)  # type: ignore[attr-defined]
