"""Weight sync by process group: the trainer broadcasts to all servers, over NCCL between GPUs, else over gloo."""

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
from trainer.engine.sglang.http_client import REQUEST_TIMEOUT_S, RequestRefused, ServerUnavailable, run_all
from trainer.engine.sglang.weight_sync.base import (
    NamedTensor,
    SyncTarget,
    bucket_size,
    load_timeout_s,
    post_checked,
    selector,
    split_into_buckets,
    weight_update,
)
from trainer.engine.sglang.weight_sync.flat_bucket import LOAD_FORMAT, flatten_bucket

Result = TypeVar("Result")
JOIN_TIMEOUT_S = 120.0
BUCKET = 2**29
"""Bytes in a bucket; trainer and servers need as many beside their weights."""


class ProcessGroupSync:
    """The group is kept until a server fails, and is then created again with those that are up."""

    name = "group"

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._members: tuple[SyncTarget, ...] = ()
        self._device = torch.device("cpu")
        """Where the trainer's weights were, if ever on a GPU: copies of them are sent from there, too."""

    async def send(
        self, targets: Sequence[SyncTarget], weights: Mapping[str, Tensor], version: int, flush: bool, *_: object
    ) -> int:
        size, parts = 0, split_into_buckets(weights, BUCKET, targets)
        part = await to_thread.run_sync(parts.__getitem__, 0)
        device = part[0][1].device
        self._device = device if device.type == "cuda" else self._device
        try:
            if self._members != tuple(targets):
                await self.close()
                await self._join(tuple(targets), "nccl" if self._device.type == "cuda" else "gloo")
            async with AsyncExitStack() as stack:
                for target in targets:
                    await stack.enter_async_context(weight_update(target))
                for index in range(len(parts)):
                    if index:
                        del part  # So that there is one bucket at a time.
                        part = await to_thread.run_sync(parts.__getitem__, index)
                    size += bucket_size(part)
                    await self._broadcast(part, version if index == len(parts) - 1 else None, flush)
        except BaseException as error:
            with anyio.move_on_after(REQUEST_TIMEOUT_S, shield=True):
                await self.close()
            # A live server refuses a broadcast that a dead one broke.
            if isinstance(error, RequestRefused) and len(targets) > 1:
                raise ServerUnavailable(str(error)) from error
            raise
        return size

    async def _broadcast(self, part: Sequence[NamedTensor], version: int | None, flush: bool) -> None:
        flat = await to_thread.run_sync(flatten_bucket, part, self._device)
        body: dict[str, Any] = {
            "names": [tensor.name for tensor in flat.parts],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in flat.parts],
            "shapes": [list(tensor.shape) for tensor in flat.parts],
            "group_name": self._group_name,
            "flush_cache": flush and version is not None,
        }
        body |= LOAD_FORMAT | selector(self._members)
        body |= {} if version is None else {"weight_version": str(version)}
        path = "/update_weights_from_distributed"
        within = load_timeout_s(flat.data.nbytes)
        takes = [partial(post_checked, target.client, path, body, within=within) for target in self._members]
        await run_all([*takes, partial(_run_in_thread, self._broadcast_tensor, flat.data, within)])

    def _broadcast_tensor(self, data: Tensor, within: float) -> None:
        work = dist.broadcast(data, src=0, group=self._group, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=within))

    async def _join(self, targets: tuple[SyncTarget, ...], backend: str) -> None:
        """Joins trainer and servers at the same time, since each waits for all others."""
        self._members, self._group_name = targets, f"mtrl-{secrets.token_hex(4)}"
        size = 1 + sum(target.features.ranks for target in targets)
        address = local_address(targets[0].client.url)
        # Only whoever reaches this address can reach the group's store; its port is never free for others.
        listener = socket.create_server((address, 0), backlog=size)
        port = listener.getsockname()[1]
        body = {
            "master_address": address,
            "master_port": port,
            "world_size": size,
            "group_name": self._group_name,
            "backend": backend,
        }
        ranks = accumulate((target.features.ranks for target in targets), initial=1)
        joins = [
            partial(
                post_checked,
                target.client,
                "/init_weights_update_group",
                body | {"rank_offset": rank},
                within=JOIN_TIMEOUT_S,
            )
            for target, rank in zip(targets, ranks, strict=False)
        ]

        async def join() -> None:
            store = partial(TCPStore, address, port, size, is_master=True, master_listen_fd=listener.detach())
            self._group = await _run_in_thread(_create_group, store, size, self._group_name, backend)

        with listener:
            await run_all([*joins, join])

    async def close(self) -> None:
        group, members, self._group, self._members = self._group, self._members, None, ()
        for target in members:
            with anyio.move_on_after(REQUEST_TIMEOUT_S):
                try:
                    await post_checked(target.client, "/destroy_weights_update_group", {"group_name": self._group_name})
                except EngineError:
                    continue  # The server is gone, and its part of the group with it.
        if group is not None:
            with suppress(ServerUnavailable):  # A broken group cannot be left properly.
                await _run_in_thread(dist.destroy_process_group, group)


async def _run_in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Runs a blocking call of a process group in a thread, which can be abandoned but not stopped. Torch reports a lost
    peer by a RuntimeError."""
    try:
        return await to_thread.run_sync(function, *arguments, abandon_on_cancel=True)
    except RuntimeError as error:
        raise ServerUnavailable(
            f"the process group of the trainer and SGLang broke: {type(error).__name__}: {error}"
        ) from error


def _create_group(make_store: Callable[..., TCPStore], size: int, name: str, backend: str) -> dist.ProcessGroup:
    """Creates a group as SGLang does: a second one beside torch's default group, which torch's public API does not
    offer."""
    wait = timedelta(seconds=JOIN_TIMEOUT_S)
    store = c10d.PrefixStore(name, make_store(timeout=wait))
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), store, group_name=c10d.GroupName(name), timeout=wait
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def local_address(url: str) -> str:
    """The address of this machine as the server sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # Sends nothing.
        return str(line.getsockname()[0])
