"""Trainer and servers are one process group, in which the trainer broadcasts: NCCL between GPUs, gloo elsewhere."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import torch
import torch.distributed as dist
from anyio import to_thread
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from trainer.engine.base import EngineError
from trainer.engine.sglang.publish.way import Named, Target, buckets, distinct, told, updating, within_s
from trainer.engine.sglang.together import together
from trainer.engine.sglang.wire import ASK_S, Gone, Refused

Result = TypeVar("Result")
JOIN_S = 120.0
BUCKET = 2**30


class ByGroup:
    """The group stands until a server fails, and is then made anew with those that are there."""

    name = "group"

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._named = ""
        self._members: tuple[Target, ...] = ()
        self._device = torch.device("cpu")
        """Where the trainer's weights were, if ever on a GPU: a copy of them goes the same way."""

    async def send(self, targets: Sequence[Target], weights: Mapping[str, Tensor], version: int, flush: bool) -> None:
        parts = list(buckets(distinct(weights), BUCKET))
        device = parts[0][0][1].device
        self._device = device if device.type == "cuda" else self._device
        try:
            if self._members != tuple(targets):
                await self.close()
                await self._join(tuple(targets), "nccl" if self._device.type == "cuda" else "gloo")
            async with AsyncExitStack() as stack:
                for target in targets:
                    await stack.enter_async_context(updating(target))
                for place, part in enumerate(parts):
                    await self._broadcast(part, version if place == len(parts) - 1 else None, flush)
        except BaseException as error:
            with anyio.move_on_after(ASK_S, shield=True):
                await self.close()
            if isinstance(error, Refused) and len(targets) > 1:  # Who lives refuses what one that died left undone.
                raise Gone(str(error)) from error
            raise

    async def _broadcast(self, part: Sequence[Named], version: int | None, flush: bool) -> None:
        body: dict[str, Any] = {
            "names": [name for name, _ in part],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
            "group_name": self._named,
            "flush_cache": flush and version is not None,
        }
        body |= {} if version is None else {"weight_version": str(version)}
        path = "/update_weights_from_distributed"
        takes = [partial(told, target.wire, path, body, within=within_s(part)) for target in self._members]
        await together([*takes, partial(_threaded, self._spoken, part)])

    def _spoken(self, part: Sequence[Named]) -> None:
        there = [tensor.to(self._device).contiguous() for _, tensor in part]
        works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in there]
        for work in works:
            if work is not None:
                work.wait(timedelta(seconds=within_s(part)))

    async def _join(self, targets: tuple[Target, ...], backend: str) -> None:
        """Trainer and servers come in at once: each waits for all others."""
        self._members, self._named = targets, f"mtrl-{secrets.token_hex(4)}"
        size = 1 + sum(target.facts.ranks for target in targets)
        address, port = here(targets[0].wire.url), _free()
        body = {
            "master_address": address,
            "master_port": port,
            "world_size": size,
            "group_name": self._named,
            "backend": backend,
        }
        ranks = accumulate((target.facts.ranks for target in targets), initial=1)
        joins = [
            partial(told, target.wire, "/init_weights_update_group", body | {"rank_offset": rank}, within=JOIN_S)
            for target, rank in zip(targets, ranks, strict=False)
        ]

        async def join() -> None:
            self._group = await _threaded(_joined, address, port, size, self._named, backend)

        await together([*joins, join])

    async def close(self) -> None:
        group, members, self._group, self._members = self._group, self._members, None, ()
        for target in members:
            with anyio.move_on_after(ASK_S):
                try:
                    await told(target.wire, "/destroy_weights_update_group", {"group_name": self._named})
                except EngineError:
                    continue  # It is not there any more, and neither is its part of the group.
        if group is not None:
            with suppress(Gone):  # What broke can be left no better.
                await _threaded(dist.destroy_process_group, group)


async def _threaded(act: Callable[..., Result], *given: Any) -> Result:
    """Whoever waits for others in a process group cannot be told to stop waiting, but may be left alone with it.
    Torch says that another is lost by a RuntimeError, of whatever kind."""
    try:
        return await to_thread.run_sync(act, *given, abandon_on_cancel=True)
    except RuntimeError as error:
        raise Gone(f"the process group of the trainer and SGLang broke: {type(error).__name__}: {error}") from error


def _joined(address: str, port: int, size: int, name: str, backend: str) -> dist.ProcessGroup:
    """As SGLang joins: a group beside the default one, which torch makes for nobody but itself."""
    wait = timedelta(seconds=JOIN_S)
    store = c10d.PrefixStore(name, TCPStore(address, port, size, is_master=True, timeout=wait))
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), store, group_name=c10d.GroupName(name), timeout=wait
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def here(url: str) -> str:
    """Our address, as the server sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # Sends nothing.
        return str(line.getsockname()[0])


def _free() -> int:
    with socket.socket() as port:
        port.bind(("", 0))
        return int(port.getsockname()[1])
