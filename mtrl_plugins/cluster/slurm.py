"""Renders an sbatch script: servers and trainer ranks as two steps of one job, which requeues itself and resumes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from gateway.errors import ConfigError
from gateway.plural import format_count
from mtrl_plugins.cluster.cluster_plan import (
    LOGS,
    RENDEZVOUS_PORT,
    SANDBOXES_PORT,
    SERVER_PORT,
    SERVERS_START_S,
    STOP_S,
    ClusterPlan,
    check_text,
)

SCRIPT = "job.sbatch"
BODY = Path(__file__).with_name("slurm_job.sh")
_OPTION = re.compile(r"[a-z]+(-[a-z0-9]+)*")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")


@dataclass(frozen=True)
class SlurmOptions:
    """What only Slurm needs to know."""

    folder: Path
    """The working folder, from which relative paths of the run file lead; all nodes share it."""
    out: Path
    """The folder of the script and the logs, which all nodes share, too."""
    programs: Path
    """The folder of `mtrl-train`."""
    setup: Path | None = None
    """A shell file that prepares the environment on each start, such as with `module load`."""
    directives: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch, without their dashes."""


def render_slurm(plan: ClusterPlan, options: SlurmOptions) -> dict[str, str]:
    """The files of the job by name."""
    for name, path in (("the working folder", options.folder), ("--out", options.out)):
        _check_path(name, path)
    if plan.sandboxes > plan.all_nodes:
        problem = f"{plan.sandboxes} servers of sandboxes do not fit {format_count(plan.all_nodes, 'node')}"
        raise ConfigError(problem, field="--sandboxes", remedy="ask for one a node at most")
    if options.setup is not None:
        check_text("--setup", str(options.setup))
    parts = ("#!/bin/bash", *_header(plan, options), *_directives(plan, options), "", *_variables(plan, options), "")
    return {SCRIPT: "\n".join(parts) + BODY.read_text(encoding="utf-8")}


def parse_directives(words: Sequence[str]) -> Mapping[str, str]:
    """Reads `OPTION=VALUE`, or `OPTION` alone."""
    directives = {}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        check_text("--sbatch", word)
        if not _OPTION.fullmatch(name) or '"' in value or "\\" in value:
            remedy = "write --sbatch OPTION=VALUE, such as qos=high, without quotes in the value"
            raise ConfigError(f"{word!r} is no option of sbatch", field="--sbatch", remedy=remedy)
        directives[name] = value
    return directives


def _check_path(name: str, path: Path) -> None:
    """Slurm reads a backslash in a path as an order to leave patterns such as %j alone."""
    check_text(name, str(path))
    if "\\" in str(path) or '"' in str(path):
        problem = "has a backslash or a quote, which Slurm does not take in a path"
        raise ConfigError(problem, file=path, field=name, remedy="rename the folder")


def _header(plan: ClusterPlan, options: SlurmOptions) -> Iterator[str]:
    script = quote(str(options.out / SCRIPT))
    servers = plan.servers
    yield f"# {plan.name}: {plan.ranks} trainer ranks on {format_count(plan.nodes, 'node')}" + (
        f", {format_count(servers.count, 'SGLang server')} on {format_count(servers.nodes, 'node')}" if servers else ""
    )
    yield "# Made by `mtrl-train render slurm`; render again rather than edit."
    yield "#"
    yield f"# Submit:  sbatch {script}"
    yield "# Order:   SGLang servers, if any; then, once all answer, one trainer process for each GPU."
    yield f"# Logs:    {plan.logs}: a file for each rank, server and rollout worker."
    yield f"#          What this script says: {options.out / LOGS}/JOB.log"
    yield f"# Run:     {plan.run_folder}"
    yield f"# Resume:  by itself, {STOP_S} s before the time limit, after a lost node, or {plan.retries} failures."
    yield "#          By hand: submit it again. It continues the run's latest checkpoint."
    yield "# Stop:    scancel JOB"


def _directives(plan: ClusterPlan, options: SlurmOptions) -> Iterator[str]:
    """Whole nodes: other jobs would meet the same ports and memory."""
    log = str(options.out / LOGS).replace("%", "%%") + "/%j.log"
    values: dict[str, str | None] = {
        "job-name": plan.name,
        "nodes": str(plan.all_nodes),
        **({"gpus-per-node": str(plan.gpus)} if plan.gpus else {}),
        "exclusive": None,
        "mem": "0",
        **({"time": format_duration(plan.seconds)} if plan.seconds is not None else {}),
        "signal": f"B:USR1@{STOP_S}",
        "requeue": None,
        "open-mode": "append",
        "chdir": str(options.folder),
        "output": log,
    }
    if taken := sorted(values.keys() & options.directives.keys()):
        remedy = "leave it out, or edit the script"
        raise ConfigError(f"{taken[0]} is set by this command itself", field="--sbatch", remedy=remedy)
    values |= {name: value or None for name, value in options.directives.items()}
    for name, value in values.items():
        yield f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_directive_value(value)}"


def _directive_value(value: str) -> str:
    """sbatch knows quotes, but expands nothing."""
    return value if _PLAIN.fullmatch(value) else f'"{value}"'


def format_duration(seconds: int) -> str:
    """A time limit as Slurm writes it."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else f"{hours:02}:{minutes:02}:{rest:02}"


def _variables(plan: ClusterPlan, options: SlurmOptions) -> Iterator[str]:
    """Everything that differs between jobs, quoted for the shell."""
    servers = plan.servers
    yield from (f"export {name}={quote(value)}" for name, value in plan.environment.items())
    texts = {
        "folder": str(options.folder),
        "notes": str(options.out / LOGS),
        "logs": str(plan.logs),
        "run": str(plan.run_folder),
        "programs": str(options.programs),
        "setup": str(options.setup or ""),
    }
    yield from (f"{name}={quote(value)}" for name, value in texts.items())
    numbers = {
        "trainer_nodes": plan.nodes,
        "ranks_each": plan.ranks_each,
        "rendezvous_port": RENDEZVOUS_PORT,
        "stop_s": STOP_S,
        "retries": plan.retries,
        "sandboxes": plan.sandboxes,
        "sandboxes_port": SANDBOXES_PORT,
    }
    if servers:
        numbers |= {
            "servers_each": servers.each,
            "server_gpus": servers.gpus if plan.gpus else 0,
            "server_port": SERVER_PORT,
            "servers_start_s": SERVERS_START_S,
        }
    yield from (f"{name}={number}" for name, number in numbers.items())
    yield _array("gpu_options", [f"--gpus-per-node={plan.gpus}"] if plan.gpus else [])
    yield _array("train", plan.train_command(str(plan.run_file)))
    if servers:
        yield _array("server", servers.arguments)


def _array(name: str, words: Sequence[str]) -> str:
    return f"{name}=({' '.join(map(quote, words))})"
