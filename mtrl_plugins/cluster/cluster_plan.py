"""Plans a job on a cluster: its trainer ranks and SGLang servers, on how many nodes, with which commands.

Rendered files are written into a folder that has nothing else in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError
from trainer.data.tasks import example_names
from trainer.engines import PIPELINE_PARALLEL_FLAGS, TENSOR_PARALLEL_FLAGS, has_vision, read_flag
from trainer.storage.run_files import LOGS_FOLDER
from trainer.train.settings import TrainSettings

SERVER_PORT = 30000
"""The first server's port on each node; the node's other servers have those that follow."""
RENDEZVOUS_PORT = 29500
"""Where the ranks find each other, on the first trainer node."""
SANDBOXES_PORT = 27500
"""Of servers of sandboxes."""
SERVERS_START_S = 1800
"""How long the trainer waits for the servers: a large model takes long to read from a shared file system."""
STOP_S = 300
"""Seconds before the time limit, or after the request to end, in which a job saves what is finished."""
MAX_NAME = 40
"""Kubernetes allows 63 characters, of which it and we append some."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class ClusterOptions:
    """What a user says about the cluster and the job on it."""

    nodes: int = 1
    """All nodes of the job."""
    gpus: int = 8
    """GPUs of each node; 0 for a job on CPUs."""
    server_nodes: int | None = None
    """How many of the nodes run SGLang servers alone; by default half of them, if SGLang is the engine."""
    name: str | None = None
    time: str | None = None
    """The time limit as `HH:MM:SS` or `DAYS-HH:MM:SS`."""
    retries: int = 3
    """How often a job that failed is started again."""
    environment: Mapping[str, str] | None = None
    """Variables for all processes."""
    sandboxes: int = 0
    """Servers of sandboxes."""


@dataclass(frozen=True)
class ServerRole:
    """The SGLang servers."""

    nodes: int
    each: int
    """Servers on each node."""
    gpus: int
    """GPUs of each server: its tensor-parallel times its pipeline-parallel size."""
    arguments: tuple[str, ...]
    """Arguments of `sglang.launch_server` but for host, port and first GPU."""

    @property
    def count(self) -> int:
        """All servers."""
        return self.nodes * self.each


@dataclass(frozen=True)
class ClusterPlan:
    """A job on a cluster, whichever scheduler runs it."""

    name: str
    """The job's name, which is valid for Kubernetes."""
    run_file: Path
    """The run file on the machine that renders."""
    run_folder: PurePosixPath
    """The run's folder, which all nodes share."""
    nodes: int
    """Trainer nodes."""
    gpus: int
    """GPUs of each node; 0 for CPUs."""
    servers: ServerRole | None
    seconds: int | None
    """The time limit."""
    retries: int
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What the user should know about the plan."""
    sandboxes: int = 0
    """Servers of sandboxes."""

    @property
    def ranks_each(self) -> int:
        """Ranks on each trainer node: one for each GPU."""
        return max(1, self.gpus)

    @property
    def ranks(self) -> int:
        """All ranks: the world size."""
        return self.nodes * self.ranks_each

    @property
    def all_nodes(self) -> int:
        """Trainer nodes and server nodes."""
        return self.nodes + (self.servers.nodes if self.servers else 0)

    @property
    def logs(self) -> PurePosixPath:
        """The folder with the logs of all processes."""
        return self.run_folder / LOGS_FOLDER

    def train_command(self, run_file: str) -> tuple[str, ...]:
        """The command of every rank; the engine and `--resume` follow where they are known."""
        return ("mtrl-train", "--config", run_file, "--out", str(self.run_folder))


def plan_cluster(
    settings: TrainSettings, run_file: Path, options: ClusterOptions, shared: PurePosixPath
) -> ClusterPlan:
    """Plans the job of a run file; `shared` is the folder in which relative paths of the run file lie."""
    check_text("--config", str(run_file))
    check_text("the working folder", str(shared))
    name, notes = _job_name(options.name, run_file)
    if options.nodes < 1 or options.gpus < 0:
        raise ConfigError("a job needs a node", field="--nodes", remedy="ask for one or more")
    servers = _plan_servers(settings, options, shared)
    nodes = options.nodes - (servers.nodes if servers else 0)
    plan = ClusterPlan(
        name,
        run_file,
        shared / str(settings.out or f"runs/{name}"),
        nodes,
        options.gpus,
        servers,
        parse_duration(options.time) if options.time is not None else None,
        options.retries,
        _check_environment(options.environment or {}),
        (*notes, *_notes(settings, servers, nodes)),
        options.sandboxes,
    )
    check_text("out", str(plan.run_folder))
    _check_world_size(settings, plan)
    return plan


def _job_name(name: str | None, run_file: Path) -> tuple[str, tuple[str, ...]]:
    """The name that was asked for, or a valid one made of the run file's."""
    if name is not None:
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            problem = (
                f"{name!r} is no name that all schedulers take: up to {MAX_NAME} small letters, digits and dashes, "
                "beginning with a letter and ending with no dash"
            )
            raise ConfigError(problem, field="--name", remedy=f"for instance --name {make_name(name)}")
        return name, ()
    made = make_name(run_file.stem)
    return made, () if made == run_file.stem else (
        f"the job's name is {made}, since schedulers refuse {run_file.stem!r}",
    )


def make_name(text: str) -> str:
    """A valid name like the text."""
    made = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    made = made if made[:1].isalpha() else f"run-{made}"
    return made[:MAX_NAME].strip("-")


def _plan_servers(settings: TrainSettings, options: ClusterOptions, shared: PurePosixPath) -> ServerRole | None:
    """The servers on nodes of their own, if there are any."""
    wants_sglang = settings.engine in ("auto", "sglang")
    default = options.nodes // 2 if wants_sglang and settings.model not in example_names() else 0
    nodes = default if options.server_nodes is None else options.server_nodes
    if not nodes:
        return None
    if not wants_sglang:
        remedy = "set `engine: sglang` in the run file, or --server-nodes 0"
        raise ConfigError(f"the run file's engine is {settings.engine}", field="--server-nodes", remedy=remedy)
    if settings.model in example_names():
        remedy = "name a model's folder in the run file, or --server-nodes 0"
        raise ConfigError(f"servers have no folder of the model {settings.model!r}", field="model", remedy=remedy)
    if nodes >= options.nodes:
        problem = f"{nodes} of {options.nodes} nodes would serve, and none would train"
        raise ConfigError(problem, field="--server-nodes", remedy="ask for more --nodes, or fewer --server-nodes")
    gpus = count_server_gpus(settings)
    if options.gpus and (gpus > options.gpus or options.gpus % gpus):
        fitting = ", ".join(str(size) for size in range(1, options.gpus + 1) if options.gpus % size == 0)
        problem = f"servers of {gpus} GPUs (tp times pp) do not divide the {options.gpus} GPUs of a node"
        raise ConfigError(problem, field="serving.options", remedy=f"set --tp to one of {fitting}")
    each = options.gpus // gpus if options.gpus else 1
    return ServerRole(nodes, each, gpus, server_arguments(settings, shared))


def count_server_gpus(settings: TrainSettings) -> int:
    """GPUs of a server: its tensor-parallel times its pipeline-parallel size."""
    flags = settings.serving.options
    return read_flag(flags, 1, *TENSOR_PARALLEL_FLAGS) * read_flag(flags, 1, *PIPELINE_PARALLEL_FLAGS)


def server_arguments(settings: TrainSettings, shared: PurePosixPath) -> tuple[str, ...]:
    """As our own servers are started; requests and answers are ids, so only images need the tokenizer."""
    serving = settings.serving
    return (
        *("--model-path", str(shared / settings.model)),
        *("--host", "0.0.0.0"),  # noqa: S104 - servers are reached from other nodes
        *(("--skip-tokenizer-init",) if _reads_text_only(Path(settings.model)) else ()),
        *serving.options,
    )


def _reads_text_only(model: Path) -> bool:
    """Whether the model is here to be looked at, and takes no images."""
    return (model / "config.json").is_file() and not has_vision(model)


def _notes(settings: TrainSettings, servers: ServerRole | None, nodes: int) -> tuple[str, ...]:
    notes = []
    if servers and settings.serving.replicas not in (1, servers.count):
        notes.append(
            f"`serving.replicas: {settings.serving.replicas}` is not used: {servers.count} servers fit the nodes"
        )
    if servers is None and nodes > 1 and settings.engine in ("auto", "sglang"):
        notes.append("rank 0 starts the engine on its own node; --server-nodes gives servers nodes of their own")
    return tuple(notes)


def _check_world_size(settings: TrainSettings, plan: ClusterPlan) -> None:
    """Every rank needs rollouts to train on."""
    rollouts, shares = settings.prompts * settings.n, plan.ranks // settings.distributed.row_ranks
    if shares > rollouts:
        problem = f"{plan.ranks} ranks share {rollouts} rollouts a step (`prompts` times `n`): some would have none"
        remedy = f"ask for fewer nodes, or set `prompts: {-(-shares // settings.n)}` or more"
        raise ConfigError(problem, field="prompts", remedy=remedy)


def _check_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    for name in environment:
        if not _VARIABLE.fullmatch(name):
            remedy = "write it as --env NAME=VALUE, with letters, digits and _ in the name"
            raise ConfigError(f"{name!r} is no name of a variable", field="--env", remedy=remedy)
    return environment


def parse_environment(words: Sequence[str]) -> Mapping[str, str]:
    """Reads `NAME=VALUE`."""
    for word in words:
        if "=" not in word or "\0" in word:
            raise ConfigError(f"{word!r} is not NAME=VALUE", field="--env", remedy="write --env NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def parse_duration(text: str) -> int:
    """The seconds of `HH:MM:SS` or `DAYS-HH:MM:SS`."""
    found = _DURATION.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 2 * STOP_S:
        problem = f"{text!r} is no time limit of {2 * STOP_S // 60} minutes or more"
        raise ConfigError(problem, field="--time", remedy="write HH:MM:SS or DAYS-HH:MM:SS, such as 08:00:00")
    return total


def check_text(field: str, text: str) -> None:
    """Refuses control characters, which end a line of a script or a comment."""
    if _CONTROL.search(text):
        raise ConfigError(f"{text!r} has a control character", field=field, remedy="rename it")


MARK = ".rendered-by-mtrl"
"""A file that says that the folder is ours, so that rendering again may replace its files."""
LOGS = "logs"
TOKEN_LINE = re.compile(r"^stringData:\n +token: (.*)$", re.MULTILINE)
"""Of a secret that was made for the job."""


def hash_token(token: str) -> str:
    """What a pod's template has of a token: servers start again where theirs is another one."""
    return sha256(token.strip("'").encode()).hexdigest()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files; those of an earlier rendering are replaced, other files are never touched."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("is a file", file=folder, field="--out", remedy="name a folder")
    known = {MARK, LOGS, *_earlier(folder)}
    others = sorted(item.name for item in folder.iterdir() if item.name not in known) if folder.is_dir() else []
    if others:
        problem = f"has other files: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
        raise ConfigError(problem, file=folder, field="--out", remedy="name an empty or a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in _earlier(folder) - files.keys():
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / MARK, "".join(f"{name}\n" for name in files).encode())
    for name, text in files.items():
        _write(folder / name, text)


def _write(file: Path, text: str) -> None:
    """Writes a file; one with a token for its owner alone, and with the token of an earlier rendering, which pods that
    run have."""
    if (new := TOKEN_LINE.search(text)) is None:
        write_atomically(file, text.encode())
        return
    with suppress(OSError, UnicodeDecodeError):
        if earlier := TOKEN_LINE.search(file.read_text(encoding="utf-8")):
            text = text.replace(hash_token(new[1]), hash_token(earlier[1])).replace(new[0], earlier[0])
    mask = os.umask(0o077)
    try:
        write_atomically(file, text.encode())
    finally:
        os.umask(mask)


def _earlier(folder: Path) -> set[str]:
    """The files of an earlier rendering, by its mark. A name that leads elsewhere is not one of them."""
    mark = folder / MARK
    lines = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    return {line for line in lines if line and "/" not in line and line not in (".", "..")}
