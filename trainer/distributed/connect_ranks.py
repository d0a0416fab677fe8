"""Connects ranks, also those that this process launches."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from subprocess import PIPE, Popen
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from gateway.process.spawn import end_process, spawn
from trainer.distributed.errors import LostRankError, RankError, ReportedRankError
from trainer.distributed.layer_clock import LayerClock
from trainer.distributed.rank_environment import LAUNCHED, RankEnvironment
from trainer.distributed.rank_failures import describe_failure, name_rank, read_failures, report_failure
from trainer.distributed.rank_output import rank_log
from trainer.distributed.settings import DISK_TIMEOUT_S, DistributedSettings, find_mesh
from trainer.distributed.watchdog import Watchdog
from trainer.policy.context_parallel import ContextGroup

LOOPBACK = "127.0.0.1"
STAGE_KEY, NAME_KEY, DEVICE_KEY = "stage/{}", "name/{}", "device/{}"
ASK_KEY, REPLY_KEY = "ask/{}", "reply/{}"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun where its agents serve the store."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
POLL_S = 0.05
JOIN_S = 300.0
"""How long ranks wait for each other at the start, at least: imports may take minutes from a network disk."""
GROUP_MARGIN_S = 60.0
"""How much longer than this the calls of a process group wait: the watchdog speaks first, in words."""
CLOSE_S = 30.0
"""How long the end waits for what is still being written after the ranks lost each other."""
JOIN_REMEDY = (
    "start all of them, let them reach each other, and raise `distributed.timeout_s` if they are slow to start"
)
DEVICE_REMEDY = (
    "look at the driver, CUDA_VISIBLE_DEVICES and torch's build on the machine without CUDA: all ranks need a GPU, or"
    " none has one"
)


class ProcessGroupRanks:
    """The ranks of this run, connected."""

    def __init__(
        self, environment: RankEnvironment, settings: DistributedSettings, store: Store, device: torch.device
    ) -> None:
        self.rank, self.size = environment.rank, environment.size
        self.environment, self.settings, self.store, self.device = environment, settings, store, device
        self.watchdog = Watchdog(self.side_store, self.rank)
        self.clock = LayerClock(device)
        self.background: Future[Any] | None = None
        """What this rank does beside its commands, with the background group."""

    @property
    def weights_device(self) -> torch.device:
        """Where this rank keeps its part of weights, gradients and optimizer."""
        return torch.device("cpu") if self.settings.offload else self.device

    @cached_property
    def background_group(self) -> dist.ProcessGroup:
        """A group for what runs beside the commands, whose calls would mix with theirs. Made by all ranks."""
        with _chosen_interface(self.environment):
            group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=group_timeout(self.settings.timeout_s))
        _set_pg_timeout(group_timeout(DISK_TIMEOUT_S), group)
        return group

    @cached_property
    def side_store(self) -> Store:
        """Another connection to the store, for what never waits: a wait occupies the first one."""
        store: Any = self.store
        clone: Store = store.clone()
        return clone

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Copies of the weights, by rows of a copy, by parts of each matrix; without a dimension that is not used."""
        sizes = find_mesh(self.settings, self.size)
        used = {name: size for name, size in sizes.items() if name == "shard" or size > 1}
        with _chosen_interface(self.environment):
            mesh = init_device_mesh(self.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        if len(used) > 1:
            for name in used:  # Groups of a part of the ranks are made with torch's own timeout.
                _set_pg_timeout(group_timeout(self.settings.timeout_s), mesh.get_group(name))
        return mesh

    @cached_property
    def data_mesh(self) -> DeviceMesh:
        """The ranks with the same part of each matrix, which compute different rows of a step (FSDP, HSDP)."""
        if self.tensor_mesh is None:
            return self.mesh
        return self.mesh["replicate", "shard"] if self.mesh.ndim == 3 else self.mesh["shard"]

    @cached_property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The ranks that compute the same rows, each with a part of every matrix; None if a rank has whole ones."""
        return self.mesh["tensor"] if self.settings.tensor_parallel > 1 else None

    @cached_property
    def context(self) -> ContextGroup | None:
        """The ranks that share this one's rows, each with a part of their tokens; None if a rank has whole rows."""
        tensor, size, unit = self.settings.tensor_parallel, self.settings.context_parallel, self.settings.row_ranks
        if size == 1:
            return None
        starts = [share * unit + place for share in range(self.shares) for place in range(tensor)]
        members = [list(range(start, start + unit, tensor)) for start in starts]
        make: Any = dist.new_subgroups_by_enumeration
        with _chosen_interface(self.environment):
            group, _ = make(members, group_timeout(self.settings.timeout_s))
        return ContextGroup(self.rank % unit // tensor, size, group)

    @property
    def shares(self) -> int:
        """The number of shares of a step's rows."""
        return self.size // self.settings.row_ranks

    @property
    def share(self) -> int:
        """Which of them this rank computes, as the others of its tensor-parallel and context-parallel groups do."""
        return self.rank // self.settings.row_ranks

    def add(self, values: Sequence[float]) -> list[float]:
        is_counted = self.rank % self.settings.row_ranks == 0
        return self._add_all(values if is_counted else [0.0] * len(values))

    def _add_all(self, values: Sequence[float]) -> list[float]:
        values_N = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(values_N)
        summed: list[float] = values_N.tolist()
        return summed

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        sizes = [int(size) for size in self._add_all([len(text) * (self.rank == rank) for rank in range(self.size)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.zeros_like(own) for _ in sizes]
        dist.all_gather(parts, own)
        return [json.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def broadcast_bytes(self, content: bytes, size: int) -> bytes:
        """Sends bytes from rank 0 to all; the others pass none, and know the size."""
        buffer = torch.frombuffer(bytearray(content or bytes(size)), dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def take_busy_s(self) -> float:
        return self.clock.take_busy_s()

    def report(self, stage: str, limit_s: float | None = None) -> None:
        """The watchdog ends the run if the stage takes longer than the limit, by default `timeout_s`."""
        self.watchdog.begin_stage(stage, self.settings.timeout_s if limit_s is None else limit_s)
        self.store.set(STAGE_KEY.format(self.rank), stage)

    def report_waiting(self, stage: str) -> None:
        """Notes that this rank waits outside of collective calls."""
        self.watchdog.end_stage()
        self.store.set(STAGE_KEY.format(self.rank), stage)

    def close(self) -> None:
        if self.background is not None:
            wait([self.background], CLOSE_S)
        dist.destroy_process_group()


def group_timeout(seconds: float) -> timedelta:
    """How long the calls of a process group wait, given how long a stage may take."""
    return timedelta(seconds=seconds + GROUP_MARGIN_S)


def connect_ranks(
    environment: RankEnvironment,
    settings: DistributedSettings,
    listener: socket.socket | None = None,
    find_ended: Callable[[], Mapping[int, str]] = dict,
) -> tuple[ProcessGroupRanks, dict[int, str]]:
    """Waits for all ranks; returns their names too, or on another rank than 0 that of rank 0.

    Rank 0 of `--ranks N` passes its listening socket, and which of its children have ended.
    """
    join_s = max(JOIN_S, settings.timeout_s)
    try:
        meeting = PrefixStore("meeting", _open_store(environment, timedelta(seconds=join_s), listener))
        is_first = environment.rank == 0
        generation = uuid4().hex if is_first else _ask_generation(meeting, environment.rank, timedelta(seconds=join_s))
        store = PrefixStore(generation, meeting)
        own = PrefixStore("mtrl", store)
        device = _report_device(own, environment)
        own.set(DEVICE_KEY.format(environment.rank), device.type)  # Before its name, for which rank 0 waits.
        own.set(NAME_KEY.format(environment.rank), name_rank(environment.rank))
        answer = partial(_answer_asking, meeting, environment.size, generation)
        names = _wait_for_others(own, environment, join_s, find_ended, answer) if is_first else _read_names(own, 0)
        with _chosen_interface(environment):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("groups", store),
                rank=environment.rank,
                world_size=environment.size,
                timeout=group_timeout(settings.timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:300]
        problem = f"{environment.size} ranks could not connect at {environment.host}:{environment.port}"
        raise LostRankError(f"{problem} within {join_s:g} s ({reason})", JOIN_REMEDY) from error
    return ProcessGroupRanks(environment, settings, own, device), names


def _ask_generation(store: Store, rank: int, timeout: timedelta) -> str:
    """Asks rank 0 for the name under which these ranks meet.

    torchrun's agents keep one store while they start ranks again: what earlier ones wrote there must not be read.
    """
    token = uuid4().hex
    store.set(ASK_KEY.format(rank), token)
    key = REPLY_KEY.format(token)
    store.wait([key], timeout)
    return store.get(key).decode()


def _answer_asking(store: Store, size: int, generation: str) -> None:
    """Answers the other ranks; the question of one that has ended does no harm."""
    for rank in range(1, size):
        if store.check([ASK_KEY.format(rank)]):
            store.set(REPLY_KEY.format(store.get(ASK_KEY.format(rank)).decode()), generation)


@contextmanager
def _chosen_interface(environment: RankEnvironment) -> Iterator[None]:
    """Has the groups that are made inside use the loopback interface, if all ranks are of this machine.

    Libraries read it from the environment, from which it is removed again: servers that this process starts are not
    for this machine alone.
    """
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    added = [name for name in INTERFACE_VARIABLES if environment.launcher == "--ranks" and name not in os.environ]
    os.environ.update(dict.fromkeys(added, interface))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _report_device(store: Store, environment: RankEnvironment) -> torch.device:
    """This rank's device. Rank 0 is told if there is none, and tells it."""
    try:
        return _choose_device(environment)
    except RankError as error:
        rank = environment.rank
        if rank and report_failure(store, rank, describe_failure(rank, error)):
            raise ReportedRankError(error.problem, error.remedy) from error
        raise


def _wait_for_others(
    store: Store,
    environment: RankEnvironment,
    timeout_s: float,
    find_ended: Callable[[], Mapping[int, str]],
    answer: Callable[[], None],
) -> dict[int, str]:
    """The names of all ranks, whose questions it answers meanwhile."""
    missing, deadline = list(range(environment.size)), time.monotonic() + timeout_s
    while missing := [rank for rank in missing if not store.check([NAME_KEY.format(rank)])]:
        answer()
        if failures := read_failures(store, environment.size):
            failure = min(failures.items())[1]
            raise RankError(f"{failure.name}: {failure.problem}", failure.remedy or JOIN_REMEDY)
        if ended := find_ended():
            rank, how = min(ended.items())
            absent = ", ".join(map(str, missing))
            problem = f"rank {rank} {how} before all were connected; without rank {absent}"
            raise RankError(problem, "see its log in the run's folder, or the launcher's messages")
        if time.monotonic() > deadline:
            text = ", ".join(map(str, missing))
            raise RankError(f"of {environment.size} ranks, {text} did not arrive within {timeout_s:g} s", JOIN_REMEDY)
        time.sleep(POLL_S)
    names = _read_names(store, *range(environment.size))
    _require_same_device(store, names)
    return names


def _read_names(store: Store, *ranks: int) -> dict[int, str]:
    return {rank: store.get(NAME_KEY.format(rank)).decode() for rank in ranks}


def _require_same_device(store: Store, names: Mapping[int, str]) -> None:
    """Refuses GPU ranks beside CPU ranks: their groups differ, so they would wait for each other."""
    kinds = {rank: store.get(DEVICE_KEY.format(rank)).decode() for rank in names}
    for rank, kind in kinds.items():
        if kind != kinds[0]:
            problem = f"{names[rank]} computes on {kind}, {names[0]} on {kinds[0]}"
            raise RankError(problem, DEVICE_REMEDY)


def _choose_device(environment: RankEnvironment) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if environment.local_rank >= (count := torch.cuda.device_count()):
        problem = f"rank {environment.rank} is number {environment.local_rank + 1} on a machine with {count} GPUs"
        raise RankError(problem, "start as many ranks on a machine as it has GPUs")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def _open_store(environment: RankEnvironment, timeout: timedelta, listener: socket.socket | None) -> Store:
    if environment.launcher == "--ranks":
        options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
        place = environment.host, environment.port, environment.size, listener is not None, timeout
        return TCPStore(*place, wait_for_workers=False, **options)
    if os.environ.get(AGENT_STORE) == str(True):
        return TCPStore(environment.host, environment.port, is_master=False, timeout=timeout)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.host, str(environment.port)
    met: tuple[Store, int, int] = next(iter(rendezvous("env://", environment.rank, environment.size, timeout=timeout)))
    return met[0]


SECRET_VARIABLES = frozenset({"MTRL_WORKER_TOKEN"})
"""What rank 0 alone needs of the environment."""
END_WAIT_S = 10.0
"""How long a child may take to end by itself."""
MODULE = "trainer.distributed.follow"


class LocalRanks:
    """The child processes, and the socket where all ranks meet, which only this machine can reach."""

    def __init__(self, settings: DistributedSettings, log_folder: Path) -> None:
        self.size, self._settings, self._log_folder = settings.ranks, settings, log_folder
        self.listener = socket.create_server((LOOPBACK, 0), backlog=self.size)
        self.environment = RankEnvironment(0, self.size, 0, LOOPBACK, self.listener.getsockname()[1], "--ranks")
        self._children: dict[int, Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        for rank in range(1, self.size):
            variables = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(self.environment.port), LAUNCHED: "1",
            }  # fmt: skip
            with self.log_file(rank).open("ab") as log:
                child = self._children[rank] = spawn(  # Ctrl-C is for rank 0, which ends the others.
                    [sys.executable, "-m", MODULE],
                    env={**inherited, **variables},
                    stdin=PIPE,  # It ends with this process, and the child with it.
                    stdout=log,
                    stderr=log,
                )
            if child.stdin:
                with suppress(BrokenPipeError):  # `find_ended` tells how it ended.
                    child.stdin.write(self._settings.model_dump_json().encode() + b"\n")
                    child.stdin.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + (END_WAIT_S if kind is None else 1.0)
        for child in self._children.values():
            end_process(child, max(0.1, deadline - time.monotonic()))
            if child.stdin:
                with suppress(BrokenPipeError):
                    child.stdin.close()
        self.listener.close()
        for rank in self._children:
            if self.log_file(rank).exists() and not self.log_file(rank).stat().st_size:
                self.log_file(rank).unlink()

    def kill(self) -> None:
        """Ends the child processes, also those that are stopped, without waiting for their end."""
        for child in self._children.values():
            child.kill()

    def log_file(self, rank: int) -> Path:
        """Where a rank's own output goes."""
        return rank_log(self._log_folder, rank)

    def find_ended(self) -> dict[int, str]:
        """The ranks that have ended, and how."""
        codes = {rank: child.poll() for rank, child in self._children.items()}
        return {rank: _describe_end(code) for rank, code in codes.items() if code is not None}


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
