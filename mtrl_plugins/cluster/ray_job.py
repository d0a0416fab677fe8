"""The option `--ray`: makes a job for a Ray cluster of the settings and options of this command, and runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from gateway.errors import ConfigError
from trainer.cli.options import TrainOption, TrainOptions, add_train_option

if TYPE_CHECKING:
    from mtrl_plugins.cluster.ray_launcher import RayJob
    from trainer.train.settings import TrainSettings

RAY, SERVERS = "--ray", "--ray-servers"


def run_settings_on_ray(settings: TrainSettings, name: str, options: TrainOptions) -> None:
    """Runs the command's own job with a rank in each process; exits with the ranks' code."""
    from mtrl_plugins.cluster.ray_launcher import connect, run_on_ray
    from trainer.train.run_folder import choose_run_folder

    if (address := options.others.get(RAY)) is None:
        raise ConfigError("needs a Ray cluster", field=SERVERS, remedy="add --ray ADDRESS, or leave it out")
    if options.settings["config"] is None:
        remedy = "name a run file with --config; `mtrl-train translate` writes one from verl's or ms-swift's"
        raise ConfigError("needs a run file, which all ranks read", field="--ray", remedy=remedy)
    folder = choose_run_folder(settings, name, resume=options.resume).absolute()
    ray = connect(address)
    job = _make_job(settings, folder, options, ray.cluster_resources())

    def log(text: str) -> None:
        sys.stderr.write(f"mtrl-train: {text}\n")

    log(f"the run is {folder}")
    code = run_on_ray(ray, job, log)
    if code:
        raise typer.Exit(code)


def _make_job(settings: TrainSettings, folder: Path, options: TrainOptions, cluster: Mapping[str, float]) -> RayJob:
    from mtrl_plugins.cluster.cluster_plan import count_server_gpus, server_arguments
    from mtrl_plugins.cluster.node_process import PYTHON
    from mtrl_plugins.cluster.ray_launcher import RayJob
    from trainer.data.tasks import example_names
    from trainer.storage.run_files import LOGS_FOLDER

    examples = example_names()
    ranks, servers, resume = options.ranks, options.others.get(SERVERS), options.resume
    gpus = int(cluster.get("GPU", 0))
    wants_sglang = settings.engine == "sglang" or (settings.engine == "auto" and gpus > 0)
    if servers is None:
        servers = settings.serving.replicas if wants_sglang and settings.model not in examples else 0
    if servers and settings.model in examples:
        raise ConfigError(
            f"servers have no folder of the model {settings.model!r}", field="--ray-servers", remedy="use 0"
        )
    each = count_server_gpus(settings)
    if ranks is None:
        ranks = max(1, gpus - servers * each)
    if ranks < 1 or servers < 0:
        raise ConfigError("a job needs a rank", field="--ranks", remedy="ask for one or more")
    given = {name: value for name, value in options.settings.items() if value is not None and name != "out"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return RayJob(
        (PYTHON, "-m", "trainer.cli", *words, "--out", str(folder)),
        ranks,
        Path.cwd(),
        folder / LOGS_FOLDER,
        resumes=lambda again: (folder / "run.json").exists() if again else resume,
        servers=servers,
        server_arguments=server_arguments(settings, PurePosixPath(Path.cwd())) if servers else (),
        server_gpus=each,
        gpus=gpus > 0,
    )


add_train_option(TrainOption(name=RAY, help="Run on this Ray cluster", metavar="ADDRESS", launch=run_settings_on_ray))
add_train_option(
    TrainOption(
        name=SERVERS,
        help="SGLang servers there. Default: serving.replicas",
        metavar="N",
        kind=int,
        launch=run_settings_on_ray,
    )
)
