"""Renders a RayJob for KubeRay: a Ray cluster of a head without GPUs and a worker on each node, and its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrl_plugins.cluster.cluster_plan import STOP_S, ClusterPlan
from mtrl_plugins.cluster.kubernetes import (
    FILES,
    NO_SERVICE_LINKS,
    WORKSPACE,
    PodOptions,
    claim_name,
    files_map,
    labels,
    metadata,
    mounts,
    resources,
    secrets,
    to_yaml,
    tolerations,
    variables,
    volume_claim,
    volumes,
)

RAY_VERSION = "2.60.0"
"""The release that `mtrl-rl[ray]` is tested with; the image has to have the same one."""
SCRIPTS = {"start.sh": Path(__file__).with_name("ray_start.sh")}
HEAD_RESOURCES = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
_KEEP_S = 600
"""How long the cluster stays after the job, so that its logs can be read."""


def render_kuberay(plan: ClusterPlan, options: PodOptions) -> dict[str, str]:
    """The files of the job by name; `kubectl apply` reads them in the order of their names."""
    files = {"1-files.yaml": to_yaml(["The run file, and the job's entry point."], files_map(plan, options, SCRIPTS))}
    if options.claim is None:
        head = ["The volume that all pods share, mounted at /workspace: models, data, tools, and the run's folder."]
        files["2-volume.yaml"] = to_yaml(head, volume_claim(plan, options))
    servers = f" and {plan.servers.count} SGLang servers" if plan.servers else ""
    head = [
        f"A Ray cluster of {plan.all_nodes} nodes for {plan.ranks} trainer ranks{servers}, and the job on it.",
        f"The image needs mtrl-rl[ray], Ray {RAY_VERSION}, and SGLang where it serves.",
    ]
    files["3-rayjob.yaml"] = to_yaml(head, _ray_job(plan, options))
    return files | {"README.md": _readme(plan, options)}


def _ray_job(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    limit = {"activeDeadlineSeconds": plan.seconds} if plan.seconds is not None else {}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(plan, options, plan.name),
        "spec": {
            "entrypoint": f"sh {FILES / 'start.sh'}",
            "submissionMode": "K8sJobMode",
            "backoffLimit": plan.retries,
            **limit,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEEP_S,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "headGroupSpec": _head_group(plan, options),
                "workerGroupSpecs": [_worker_group(plan, options)],
            },
        },
    }


def _head_group(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    """The head places nothing on itself but the job's entry point."""
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    container = {
        **_container(plan, options, "ray-head"),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": HEAD_RESOURCES,
    }
    return {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
        "template": _template(plan, options, "head", container),
    }


def _worker_group(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    container = {**_container(plan, options, "ray-worker"), "resources": resources(plan, plan.gpus, options)}
    count = plan.all_nodes
    return {
        "groupName": "nodes",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {},
        "template": _template(plan, options, "node", container, tolerations(plan)),
    }


def _container(plan: ClusterPlan, options: PodOptions, name: str) -> dict[str, Any]:
    own = {
        "MTRL_FILES": str(FILES),
        "MTRL_RUN": str(plan.run_folder),
        "MTRL_RANKS": str(plan.ranks),
        "MTRL_SERVERS": str(plan.servers.count if plan.servers else 0),
    }
    return {
        "name": name,
        "image": options.image,
        "workingDir": str(WORKSPACE),
        "env": variables(plan, own),
        **secrets(options),
        "volumeMounts": mounts(),
    }


def _template(
    plan: ClusterPlan, options: PodOptions, role: str, container: dict[str, Any], extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": STOP_S,
        **NO_SERVICE_LINKS,
        **(extra or {}),
        "containers": [container],
        "volumes": volumes(plan, options),
    }
    return {"metadata": {"labels": labels(plan, role)}, "spec": spec}


def _readme(plan: ClusterPlan, options: PodOptions) -> str:
    space = f"-n {options.namespace} " if options.namespace else ""
    return f"""# {plan.name} on KubeRay

Made by `mtrl-train render kuberay`; render again rather than edit. The cluster needs the KubeRay operator.

- **Before**: the volume `{claim_name(plan, options)}` must hold what the run file names by relative paths: the
  model, the data, the tools. It appears as `{WORKSPACE}`.
- **Submit**: `kubectl apply -f .` in this folder.
- **Order**: the operator makes the Ray cluster, then runs the job on its head, which places ranks, servers and workers.
- **Watch**: `kubectl {space}get rayjob {plan.name}`; `kubectl {space}logs -f job/{plan.name}`
- **Logs**: the job's with the command above; each rank's, server's and worker's in `{plan.logs}` on the volume.
- **Run**: `{plan.run_folder}` on the volume.
- **Resume**: by itself up to {plan.retries} times, each time on a new Ray cluster. By hand:
  `kubectl {space}delete rayjob {plan.name}`, then apply again.
- **End**: the Ray cluster is deleted {_KEEP_S // 60} minutes after the job; the volume stays.
"""
