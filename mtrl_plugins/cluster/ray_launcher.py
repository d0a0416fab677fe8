"""Runs trainer ranks and SGLang servers on a Ray cluster: one placement group, an actor for each.

Ray only places and watches processes. A rank runs the same command as under torchrun, with the same variables.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, build_opener

from gateway.errors import ConfigError
from mtrl_plugins.cluster.node_process import SGLANG_PYTHON, NodeProcess
from trainer.distributed.rank_environment import NOT_AGAIN, RESTARTS
from trainer.distributed.rank_output import KEPT

HEALTH_S = 30.0
"""A server's health endpoint may generate a token before it answers."""
PAUSE_S = 2.0
NOTE_EVERY_S = 60.0


def wait_for_servers(urls: Sequence[str], within_s: float, log: Callable[[str], None]) -> None:
    """Returns once all servers answer; raises at the deadline, with the names of those that did not."""
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            remedy = "write http://HOST:PORT"
            raise ConfigError(f"{url!r} is no address of a server", field="wait-for-servers", remedy=remedy)
    opener = build_opener(ProxyHandler({}))
    end, missing, problems, noted = time.monotonic() + within_s, list(urls), dict[str, str](), time.monotonic()
    while True:
        for url in list(missing):
            left = end - time.monotonic()
            if left > 0 and (problem := _problem(opener, url, min(HEALTH_S, left))):
                problems[url] = problem
            elif left > 0:
                missing.remove(url)
        if not missing:
            return
        if time.monotonic() >= end:
            names = ", ".join(f"{url} ({problems.get(url, 'not asked')})" for url in missing)
            remedy = "look into the logs of these servers"
            raise ConfigError(f"no answer within {within_s:g} s from {names}", field="servers", remedy=remedy)
        if time.monotonic() - noted >= NOTE_EVERY_S:
            noted = time.monotonic()
            log(f"{len(urls) - len(missing)} of {len(urls)} servers answer; waiting for {', '.join(missing)}")
        time.sleep(min(PAUSE_S, max(0.0, end - time.monotonic())))


def _problem(opener: OpenerDirector, url: str, timeout_s: float) -> str:
    """Why the server is not ready; empty if it is."""
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=timeout_s):
            return ""
    except (OSError, HTTPException, ValueError) as error:
        return " ".join(str(error).split())[:200] or type(error).__name__


Log = Callable[[str], None]
PLACE_S = 600.0
"""How long the cluster may take to have room for the job, such as when an autoscaler adds nodes."""
ANSWER_S = 120.0
"""How long an actor may take to answer what takes it no time."""
START_S = 1800.0
"""How long servers may take to start."""
STOP_S = 120.0
"""How long ranks may take to save what is finished after Ctrl-C."""
VERDICT_S = 30.0
"""How long rank 0 may take to end, and to say why, once another rank has failed."""
_POLL_S = 5.0
_TAIL_BYTES, _TAIL_LINES = 8192, 10


@dataclass(frozen=True)
class RayJob:
    """What is run on the cluster."""

    command: tuple[str, ...]
    """Of every rank; `python` as its first word is that of the node."""
    ranks: int
    folder: Path
    """The working folder, which all nodes share."""
    logs: Path
    resumes: Callable[[bool], bool] = bool
    """Whether there is a run to resume; asked before each start of the ranks, with whether they start again."""
    servers: int = 0
    server_arguments: tuple[str, ...] = ()
    """Of `sglang.launch_server`, but for its port."""
    server_gpus: int = 1
    gpus: bool = True
    """Whether each rank gets a GPU; without, a CPU."""
    retries: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)


def connect(address: str) -> Any:
    """Connects to the Ray cluster, and returns the module `ray`."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        remedy = "pip install 'mtrl-rl[ray]', in the version of the cluster"
        raise ConfigError("Ray is not installed here", field="--ray", remedy=remedy) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        remedy = "name the head's address as HOST:6379, or `auto` on a node of the cluster"
        problem = f"no Ray cluster at {address}: {_one_line(error)}"
        raise ConfigError(problem, field="--ray", remedy=remedy) from error
    return ray


def run_on_ray(ray: Any, job: RayJob, log: Log) -> int:
    """Runs the job to its end; the exit code of the first rank that failed for good, or 0."""
    group = _place(ray, job)
    actors: list[Any] = []
    try:
        engine, servers = _start_servers(ray, job, group, actors, log)
        for attempt in range(job.retries + 1):
            resume = ["--resume"] if job.resumes(attempt > 0) else []
            started = replace(job, environment={**job.environment, RESTARTS: str(attempt)})
            code = _run_ranks(ray, started, group, [*engine, *resume], servers, log)
            if code in (0, NOT_AGAIN):
                return code
            if left := job.retries - attempt:
                log(f"the ranks ended with code {code} and start again ({left} retries left); logs in {job.logs}")
        log(f"the ranks ended with code {code}, and no retries are left; logs in {job.logs}")
        return code
    except ray.exceptions.RayError as error:
        remedy = "look at the cluster with `ray status`, then start again with --resume"
        raise ConfigError(f"Ray failed: {_one_line(error)}", field="--ray", remedy=remedy) from error
    finally:
        _end(ray, actors, signal.SIGTERM, 10.0)
        ray.util.remove_placement_group(group)


def _place(ray: Any, job: RayJob) -> Any:
    """Reserves room for everything at once, so that no half of a job holds GPUs."""
    each = {"GPU": 1, "CPU": 1} if job.gpus else {"CPU": 1}
    server = {"GPU": job.server_gpus, "CPU": 1} if job.gpus else {"CPU": 1}
    bundles = [*([server] * job.servers), *([each] * job.ranks)]
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_seconds=PLACE_S):
        ray.util.remove_placement_group(group)
        asked = ", ".join(f"{sum(bundle.get(kind, 0) for bundle in bundles)} {kind}" for kind in ("GPU", "CPU"))
        total = {kind: int(ray.cluster_resources().get(kind, 0)) for kind in ("GPU", "CPU")}
        has = ", ".join(f"{count} {kind}" for kind, count in total.items())
        problem = f"the cluster has no room for the job after {PLACE_S:g} s: it asks for {asked}; the cluster has {has}"
        raise ConfigError(problem, field="--ranks", remedy="ask for fewer ranks or servers, or add nodes")
    return group


def _make_actor(ray: Any, job: RayJob, group: Any, bundle: int, gpus: int) -> Any:
    """An actor in a bundle of the group; `wait` runs beside its other methods."""
    strategies = import_module("ray.util.scheduling_strategies")
    strategy = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    options = {
        "num_cpus": 1,
        "num_gpus": gpus if job.gpus else 0,
        "scheduling_strategy": strategy,
        "max_concurrency": 4,
    }
    return ray.remote(NodeProcess).options(**options).remote()


@dataclass
class Server:
    """A server's actor, what it was started with, and how often it may start again."""

    actor: Any
    arguments: tuple[Any, ...]
    starts_left: int = 5

    def start(self) -> Any:
        """Starts the process; the result is there once it has started."""
        self.starts_left -= 1
        return self.actor.start.remote(*self.arguments)


def _start_servers(
    ray: Any, job: RayJob, group: Any, actors: list[Any], log: Log
) -> tuple[list[str], dict[Any, Server]]:
    """Starts the servers, and waits until they answer; returns the option that names them, and each by its end."""
    if not job.servers:
        return [], {}
    actors += [_make_actor(ray, job, group, index, job.server_gpus) for index in range(job.servers)]
    places = ray.get([actor.place.remote() for actor in actors], timeout=PLACE_S)
    ports = ray.get([actor.free_port.remote() for actor in actors], timeout=ANSWER_S)
    servers = []
    for index, (actor, port) in enumerate(zip(actors, ports, strict=True)):
        command = (SGLANG_PYTHON, "-m", "sglang.launch_server", *job.server_arguments, "--port", str(port))
        environment = {**job.environment, **_visible(places[index][1])}
        servers.append(Server(actor, (command, environment, str(job.folder), str(job.logs / f"sglang-{index}.log"))))
    ray.get([server.start() for server in servers], timeout=ANSWER_S)
    urls = [f"http://{host}:{port}" for (host, _), port in zip(places, ports, strict=True)]
    log(f"waiting for {len(urls)} SGLang servers; logs in {job.logs}")
    wait_for_servers(urls, START_S, log)
    return ["--engine", ",".join(urls)], {server.actor.wait.remote(): server for server in servers}


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _run_ranks(ray: Any, job: RayJob, group: Any, extra: list[str], servers: dict[Any, Server], log: Log) -> int:
    """Starts all ranks, and ends all of them as soon as one fails; returns the exit code."""
    actors = [_make_actor(ray, job, group, job.servers + index, 1) for index in range(job.ranks)]
    try:
        places = ray.get([actor.place.remote() for actor in actors], timeout=PLACE_S)
        order = sorted(range(job.ranks), key=lambda index: places[index])
        actors, places = [actors[index] for index in order], [places[index] for index in order]
        port = ray.get(actors[0].free_port.remote(), timeout=ANSWER_S)
        environments = rank_environments(places, port)
        starts = [
            actor.start.remote(
                (*job.command, *extra),
                {**job.environment, **environment},
                str(job.folder),
                str(job.logs / f"rank-{environment['RANK']}.log"),
            )
            for actor, environment in zip(actors, environments, strict=True)
        ]
        ray.get(starts, timeout=ANSWER_S)
        log(f"{job.ranks} ranks run on {len({host for host, _ in places})} nodes; logs in {job.logs}")
        running = {actor.wait.remote(): rank for rank, actor in enumerate(actors)}
        rank, code = _wait_for_ranks(ray, running, servers, log)
        if rank and _ask_rank_0(ray, actors[0]) == NOT_AGAIN:
            rank, code = 0, NOT_AGAIN
        if code:
            log(f"rank {rank} ended with code {code}:\n{_read_tail(job.logs / f'rank-{rank}.log')}")
        return code
    except KeyboardInterrupt:
        log("stopping: ranks save what is finished")
        _end(ray, actors, signal.SIGINT, STOP_S)
        raise
    except ray.exceptions.RayError as error:
        log(f"a rank was lost: {_one_line(error)}")
        return 1
    finally:
        _end(ray, actors, signal.SIGTERM, 10.0)


def rank_environments(places: Sequence[tuple[str, tuple[str, ...]]], port: int) -> list[dict[str, str]]:
    """The variables of each rank, as torchrun sets them. Ranks of a node see the GPUs of all of them."""
    hosts = [host for host, _ in places]
    environments = []
    for rank, host in enumerate(hosts):
        beside = [index for index, other in enumerate(hosts) if other == host]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": beside.index(rank),
            "LOCAL_WORLD_SIZE": len(beside),
            "MASTER_ADDR": hosts[0],
            "MASTER_PORT": port,
            KEPT: 1,
        }
        visible = _visible([gpu for index in beside for gpu in places[index][1]])
        environments.append({name: str(value) for name, value in variables.items()} | visible)
    return environments


def _wait_for_ranks(ray: Any, running: dict[Any, int], servers: dict[Any, Server], log: Log) -> tuple[int, int]:
    """The first rank that failed, and its exit code; code 0 when all have ended well. Others start again."""
    while running:
        done, _ = ray.wait([*running, *servers], num_returns=1, timeout=_POLL_S)
        for end in done:
            if end in servers:
                _restart_server(ray, end, servers, log)
                continue
            rank = running.pop(end)
            if code := int(ray.get(end)):
                return rank, code
    return 0, 0


def _ask_rank_0(ray: Any, actor: Any) -> int:
    """Rank 0's exit code after another rank has failed, of which it knows whether that would happen again; 1 if its
    node is gone, too."""
    try:
        ray.get(actor.stop.remote(signal.SIGTERM, VERDICT_S), timeout=VERDICT_S + ANSWER_S)
        return int(ray.get(actor.wait.remote(), timeout=ANSWER_S))
    except ray.exceptions.RayError:
        return 1


def _read_tail(log: Path) -> str:
    """The last lines of a log, without control characters."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"(its log cannot be read: {error})"
    return "\n".join("  " + "".join(char for char in line if char.isprintable()) for line in lines)


def _restart_server(ray: Any, end: Any, servers: dict[Any, Server], log: Log) -> None:
    """Starts a server again at its address; the trainer gives it the current weights."""
    server = servers.pop(end)
    try:
        log(f"a server ended with code {ray.get(end)}: see {server.arguments[-1]}")
        if server.starts_left:
            ray.get(server.start(), timeout=ANSWER_S)
            servers[server.actor.wait.remote()] = server
    except ray.exceptions.RayError as error:
        log(f"a server was lost: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _end(ray: Any, actors: Sequence[Any], number: int, within_s: float) -> None:
    """Ends processes and their actors; those that are gone already are no error."""
    stops = [actor.stop.remote(number, within_s) for actor in actors]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=within_s + 20.0)
    for actor in actors:
        ray.kill(actor)
