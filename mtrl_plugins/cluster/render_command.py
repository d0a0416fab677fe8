"""The command `render`, which writes files for a cluster, and the two that wait for servers, which those files use."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.cli.errors import report_errors
from trainer.cli.options import app

if TYPE_CHECKING:
    from mtrl_plugins.cluster.cluster_plan import ClusterOptions, ClusterPlan

render = typer.Typer(
    no_args_is_help=True,
    help="Write the files that run a job on a cluster: for Slurm or Kubernetes.\n\n"
    "Nothing is submitted: each file says at its head what it starts, how to submit it, and where its logs are.",
)
app.add_typer(render, name="render")

PLACE = "Nodes and GPUs"
ConfigOption = Annotated[str, typer.Option("--config", metavar="FILE|JOB", help="The job's run file.")]
NodesOption = Annotated[
    int, typer.Option("--nodes", help="Nodes of the job, those of servers included.", rich_help_panel=PLACE)
]
GpusOption = Annotated[
    int, typer.Option("--gpus-per-node", help="GPUs of each node; 0 for CPUs.", rich_help_panel=PLACE)
]
ServerNodesOption = Annotated[
    int | None,
    typer.Option(
        "--server-nodes",
        metavar="N",
        help="Nodes that run SGLang servers alone, as many on each as --tp in the run file's `serving.options` allows. "
        "Default: half of the nodes, if SGLang is the engine. 0: the trainer starts its engine itself.",
        rich_help_panel=PLACE,
    ),
]
TimeOption = Annotated[
    str | None, typer.Option("--time", metavar="HH:MM:SS", help="Time limit, also DAYS-HH:MM:SS. Default: none")
]
NameOption = Annotated[str | None, typer.Option("--name", help="The job's name. Default: the run file's")]
RetriesOption = Annotated[int, typer.Option("--retries", min=0, help="How often a failed job is started again.")]
SandboxesOption = Annotated[
    int,
    typer.Option(
        "--sandboxes",
        metavar="N",
        min=0,
        help="Servers of sandboxes: pods, or nodes of a Slurm job, beside what runs there. "
        "`sandbox: {remote: {}}` stands for them.",
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="A variable for all processes; no secrets. May be repeated."),
]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the files go.")]


@render.command()
def slurm(
    config: ConfigOption,
    nodes: NodesOption = 1,
    gpus: GpusOption = 8,
    server_nodes: ServerNodesOption = None,
    time: TimeOption = None,
    name: NameOption = None,
    partition: Annotated[str | None, typer.Option(help="The partition. Default: the cluster's")] = None,
    account: Annotated[str | None, typer.Option(help="The account. Default: yours")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION=VALUE", help="Another option of sbatch, such as qos=high. May be repeated."),
    ] = None,
    setup: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A shell file that the job sources first (`module load` ...).")
    ] = None,
    retries: RetriesOption = 3,
    sandboxes: SandboxesOption = 0,
    env: EnvOption = None,
    out: OutOption = None,
) -> None:
    """Write an sbatch script that starts servers and trainer ranks, requeues itself before its limit, and resumes.

    mtrl-train render slurm --config run.yaml --nodes 4 --gpus-per-node 8 --time 08:00:00 --out slurm/

    Run this where the job will run from: its folder, the Python environment of this command and --out must be on a
    file system that all nodes share.
    """
    with report_errors():
        from mtrl_plugins.cluster.cluster_plan import LOGS, ClusterOptions, parse_environment, write_files
        from mtrl_plugins.cluster.slurm import SCRIPT, SlurmOptions, parse_directives, render_slurm

        job = ClusterOptions(nodes, gpus, server_nodes, name, time, retries, parse_environment(env or []), sandboxes)
        plan = _plan(config, job)
        named = {"partition": partition, "account": account}
        directives = {key: value for key, value in named.items() if value}
        directives.update(parse_directives([*map("=".join, directives.items()), *(sbatch or [])]))
        folder = (out or Path("slurm") / plan.name).absolute()
        options = SlurmOptions(Path.cwd(), folder, Path(sys.executable).parent, _absolute(setup), directives)
        write_files(folder, render_slurm(plan, options))
        (folder / LOGS).mkdir(exist_ok=True)
        _print_plan(plan, folder, [f"sbatch {shlex.quote(str(folder / SCRIPT))}"])


def _absolute(file: Path | None) -> Path | None:
    """The file's whole path, since a job may run elsewhere; it must exist now."""
    from gateway.errors import ConfigError

    if file is None:
        return None
    if not file.is_file():
        raise ConfigError("there is no such file", file=file, field="--setup", remedy="name a shell file")
    return file.absolute()


def _plan(config: str, options: ClusterOptions, shared: PurePosixPath | None = None) -> ClusterPlan:
    """The plan of a run file; relative paths in it lead from the working folder, or from `shared`."""
    from mtrl_plugins.cluster.cluster_plan import plan_cluster
    from trainer.cli.run_file import find_run_file, load_settings
    from trainer.train.settings import TrainSettings

    file = find_run_file(config)
    settings = load_settings(TrainSettings, file, {})
    return plan_cluster(settings, file.absolute(), options, shared or PurePosixPath(Path.cwd()))


def _print_plan(plan: ClusterPlan, folder: Path, commands: Sequence[str]) -> None:
    """Prints what was written, and the commands that submit it."""
    servers = plan.servers
    lines = [f"{plan.name}: {plan.ranks} trainer ranks on {plan.nodes} of {plan.all_nodes} nodes"]
    if servers:
        size = f"{servers.gpus} GPUs each" if plan.gpus else "on CPUs"
        lines.append(f"SGLang servers: {servers.count} on {servers.nodes} nodes, {size}")
    if plan.sandboxes:
        named = "in tool files, and in a run file's `environment`, `sandbox: {remote: {}}` stands for them"
        lines.append(f"servers of sandboxes: {plan.sandboxes}; {named}")
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"written to {folder}; submit it with:", *(f"  {command}" for command in commands)]
    sys.stdout.write("\n".join(lines) + "\n")


CLUSTER = "The cluster"
ImageOption = Annotated[str, typer.Option(metavar="IMAGE", help="An image with mtrl.", rich_help_panel=CLUSTER)]
NamespaceOption = Annotated[
    str | None, typer.Option(help="The namespace. Default: that of kubectl", rich_help_panel=CLUSTER)
]
StorageClassOption = Annotated[
    str | None,
    typer.Option(help="The class of the shared volume, which many nodes must write.", rich_help_panel=CLUSTER),
]
StorageOption = Annotated[str, typer.Option(help="The size of the shared volume.", rich_help_panel=CLUSTER)]
ClaimOption = Annotated[
    str | None,
    typer.Option(help="An existing PersistentVolumeClaim, instead of a new one.", rich_help_panel=CLUSTER),
]
SecretOption = Annotated[
    str | None,
    typer.Option(help="A Secret whose keys become variables, such as WANDB_API_KEY.", rich_help_panel=CLUSTER),
]
CpusOption = Annotated[str | None, typer.Option(help="CPUs of a pod with ranks.", rich_help_panel=CLUSTER)]
MemoryOption = Annotated[
    str | None, typer.Option(help="Memory of a pod with ranks, such as 400Gi.", rich_help_panel=CLUSTER)
]


@render.command()
def kubernetes(
    config: ConfigOption,
    image: ImageOption,
    nodes: NodesOption = 1,
    gpus: GpusOption = 8,
    server_nodes: ServerNodesOption = None,
    time: TimeOption = None,
    name: NameOption = None,
    server_image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="An image with SGLang. Default: SGLang's own of 0.5.23")
    ] = None,
    namespace: NamespaceOption = None,
    storage_class: StorageClassOption = None,
    storage: StorageOption = "500Gi",
    claim: ClaimOption = None,
    secret: SecretOption = None,
    cpus: CpusOption = None,
    memory: MemoryOption = None,
    retries: RetriesOption = 3,
    sandboxes: SandboxesOption = 0,
    env: EnvOption = None,
    out: OutOption = None,
) -> None:
    """Write manifests: an indexed Job for the ranks, a StatefulSet for SGLang servers, and a shared volume.

    mtrl-train render kubernetes --config run.yaml --image registry/mtrl:1 --nodes 4 --storage-class nfs --out k8s/

    Relative paths in the run file lead from /workspace, where pods mount the volume. Needs Kubernetes 1.31 or later.
    """
    with report_errors():
        from mtrl_plugins.cluster.cluster_plan import ClusterOptions, parse_environment, write_files
        from mtrl_plugins.cluster.kubernetes import SERVER_IMAGE, WORKSPACE, PodOptions, check_image, render_kubernetes

        options = PodOptions(image, namespace, storage_class, storage, claim, secret, cpus, memory)
        options.check()
        check_image("--server-image", server_image or SERVER_IMAGE)
        job = ClusterOptions(nodes, gpus, server_nodes, name, time, retries, parse_environment(env or []), sandboxes)
        plan = _plan(config, job, WORKSPACE)
        folder = (out or Path("kubernetes") / plan.name).absolute()
        write_files(folder, render_kubernetes(plan, options, server_image or SERVER_IMAGE))
        command = f"kubectl apply -f {shlex.quote(str(folder))}"
        _print_plan(plan, folder, [f"{command}    (first read {folder / 'README.md'})"])


@app.command("wait-for-servers", hidden=True)
def wait_for_servers(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Addresses of SGLang servers.")],
    within: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait.")] = 1800.0,
) -> None:
    """Wait until SGLang servers answer; used by rendered jobs."""
    with report_errors():
        from mtrl_plugins.cluster.ray_launcher import wait_for_servers as wait

        def log(text: str) -> None:
            sys.stderr.write(f"mtrl-train: {text}\n")

        wait(urls, within, log)


@app.command("wait-for-sandboxes", hidden=True)
def wait_for_sandboxes(
    within: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait.")] = 1800.0,
) -> None:
    """Wait until one of a job's servers of sandboxes answers; used by rendered jobs."""
    with report_errors():
        from mtrl_plugins.sandboxes.machines import wait_for_machine
        from mtrl_plugins.sandboxes.settings import RemoteSettings

        wait_for_machine(RemoteSettings(), within)
