"""The option `--ray`: makes a job for a Ray cluster of the settings and options of this command, and runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import typer

from gateway.errors import ConfigError

if TYPE_CHECKING:
    from trainer.cluster.ray_launcher import RayJob
    from trainer.train.settings import TrainSettings

RayOptions = tuple[str, int | None, int | None]
"""The cluster's address, the number of ranks, and that of servers."""


def check_ray_options(ray: str | None, servers: int | None) -> None:
    """Refuses an option that means something with `--ray` alone."""
    if ray is None and servers is not None:
        raise ConfigError("needs a Ray cluster", field="--ray-servers", remedy="add --ray ADDRESS, or leave it out")


def run_settings_on_ray(
    settings: TrainSettings, name: str, options: Mapping[str, Any], ray_options: RayOptions, *, resume: bool
) -> None:
    """Runs the command's own job with a rank in each process; exits with the ranks' code."""
    from trainer.cluster.ray_launcher import connect, run_on_ray
    from trainer.train.run_folder import choose_run_folder

    address, ranks, servers = ray_options
    if options["config"] is None:
        remedy = "name a run file with --config; `mtrl-train translate` writes one from verl's or ms-swift's"
        raise ConfigError("needs a run file, which all ranks read", field="--ray", remedy=remedy)
    folder = choose_run_folder(settings, name, resume=resume).absolute()
    ray = connect(address)
    job = _make_job(settings, folder, options, ray.cluster_resources(), ranks, servers, resume=resume)

    def log(text: str) -> None:
        sys.stderr.write(f"mtrl-train: {text}\n")

    log(f"the run is {folder}")
    code = run_on_ray(ray, job, log)
    if code:
        raise typer.Exit(code)


def _make_job(
    settings: TrainSettings,
    folder: Path,
    options: Mapping[str, Any],
    cluster: Mapping[str, float],
    ranks: int | None,
    servers: int | None,
    *,
    resume: bool,
) -> RayJob:
    from trainer.cluster.cluster_plan import count_server_gpus, server_arguments
    from trainer.cluster.node_process import PYTHON
    from trainer.cluster.ray_launcher import RayJob
    from trainer.storage.run_files import LOGS_FOLDER
    from trainer.train.settings import DEMOS

    gpus = int(cluster.get("GPU", 0))
    wants_sglang = settings.engine == "sglang" or (settings.engine == "auto" and gpus > 0)
    if servers is None:
        servers = settings.serving.replicas if wants_sglang and settings.model not in DEMOS else 0
    if servers and settings.model in DEMOS:
        raise ConfigError(
            f"servers have no folder of the model {settings.model!r}", field="--ray-servers", remedy="use 0"
        )
    each = count_server_gpus(settings)
    if ranks is None:
        ranks = max(1, gpus - servers * each)
    if ranks < 1 or servers < 0:
        raise ConfigError("a job needs a rank", field="--ranks", remedy="ask for one or more")
    words = [
        word for name, value in options.items() if value is not None and name != "out" for word in _option(name, value)
    ]
    return RayJob(
        (PYTHON, "-m", "trainer.cli", *words, "--out", str(folder)),
        ranks,
        Path.cwd(),
        folder / LOGS_FOLDER,
        resumes=lambda again: (folder / "run.json").exists() if again else resume,
        servers=servers,
        server_arguments=server_arguments(settings, PurePosixPath(Path.cwd())) if servers else (),
        server_gpus=each,
        workers=settings.rollout.workers,
        silent_s=settings.rollout.silent_s,
        gpus=gpus > 0,
    )


def _option(name: str, value: Any) -> tuple[str, str]:
    return f"--{name}", str(value)
