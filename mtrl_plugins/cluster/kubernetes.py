"""Renders Kubernetes manifests: an indexed Job for the ranks, a StatefulSet for SGLang servers, a shared volume."""

from __future__ import annotations

from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from mtrl_plugins.cluster.cluster_plan import (
    RENDEZVOUS_PORT,
    SERVER_PORT,
    SERVERS_START_S,
    STOP_S,
    WORKERS_PORT,
    ClusterPlan,
    ServerRole,
)
from mtrl_plugins.cluster.pods import (
    FILES,
    NO_SERVICE_LINKS,
    WORKSPACE,
    PodOptions,
    arguments,
    claim_name,
    files_map,
    from_field,
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
from mtrl_plugins.workers.handshake import TOKEN_VARIABLE
from trainer.distributed.rank_environment import NOT_AGAIN

SERVER_IMAGE = "lmsysorg/sglang:v0.5.23"
"""The release that mtrl is tested with."""
HERE = Path(__file__).parent
SCRIPTS = {name: HERE / f"pod_{name}" for name in ("start.sh", "rank.sh", "log.sh")}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
FINAL_CODES = [NOT_AGAIN, 126, 127]
"""Exit codes of a pod that end the job: its run would end alike, or the image does not have our programs."""
_READY_S = 10


def render_kubernetes(plan: ClusterPlan, options: PodOptions, server_image: str) -> dict[str, str]:
    """The files of the job by name; `kubectl apply` reads them in the order of their names."""
    files = {
        "1-files.yaml": to_yaml(
            ["The run file and the scripts that start the ranks."], files_map(plan, options, SCRIPTS)
        )
    }
    if options.claim is None:
        head = ["The volume that all pods share, mounted at /workspace: models, data, tools, and the run's folder."]
        files["2-volume.yaml"] = to_yaml(head, volume_claim(plan, options))
    if plan.workers:
        head = ["What rank 0 and the rollout workers have in common, made for this job. Keep this file to yourself."]
        files["2-workers.yaml"] = to_yaml(head, _worker_token(plan, options))
    if plan.servers:
        head = [
            f"{plan.servers.count} SGLang servers with {plan.servers.gpus} GPUs each, at addresses that stay.",
            "A server that ends is started again; the trainer notices and gives it the current weights.",
        ]
        service = _headless(plan, options, "servers", SERVER_PORT)
        files["3-servers.yaml"] = to_yaml(head, service, _stateful_set(plan, plan.servers, options, server_image))
    head = [
        f"{plan.ranks} trainer ranks in {plan.nodes} pods, which wait for the servers first.",
        "To start the job again after a change: kubectl delete job, then apply. It resumes its run.",
    ]
    files["4-job.yaml"] = to_yaml(head, _headless(plan, options, "ranks", RENDEZVOUS_PORT), _job(plan, options))
    return files | {"README.md": _readme(plan, options)}


def _headless(plan: ClusterPlan, options: PodOptions, role: str, port: int) -> dict[str, Any]:
    """Names for the pods of a role. Also of those that are not ready: a server is not while it takes weights."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, options, f"{plan.name}-{role}", role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(plan, role),
            "ports": [{"name": "main", "port": port}],
        },
    }


def _stateful_set(plan: ClusterPlan, servers: ServerRole, options: PodOptions, image: str) -> dict[str, Any]:
    name = f"{plan.name}-servers"
    health = {"httpGet": {"path": "/health", "port": SERVER_PORT}, "periodSeconds": _READY_S, "timeoutSeconds": 30}
    (log_start,) = arguments([f"{plan.logs}/sglang-"])
    container = {
        "name": "sglang",
        "image": image,
        "command": ["sh", str(FILES / "log.sh"), f"{log_start}$(POD_INDEX).log"],
        "args": arguments(["python3", "-m", "sglang.launch_server", *servers.arguments, "--port", str(SERVER_PORT)]),
        "workingDir": str(WORKSPACE),
        "env": [
            *variables(plan, {"SGLANG_VLM_CACHE_SIZE_MB": "0"}),
            from_field("POD_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']"),
        ],
        **secrets(options),
        "ports": [{"name": "main", "containerPort": SERVER_PORT}],
        "startupProbe": {**health, "failureThreshold": SERVERS_START_S // _READY_S},
        "readinessProbe": {**health, "failureThreshold": 6},
        "resources": resources(plan, servers.gpus),
        "volumeMounts": mounts(),
    }
    spec = {
        "automountServiceAccountToken": False,
        **NO_SERVICE_LINKS,
        "terminationGracePeriodSeconds": 30,
        **tolerations(plan),
        "containers": [container],
        "volumes": volumes(plan, options),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(plan, options, name, "servers"),
        "spec": {
            "serviceName": name,
            "replicas": servers.count,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels(plan, "servers")},
            "template": {"metadata": {"labels": labels(plan, "servers")}, "spec": spec},
        },
    }


def server_urls(plan: ClusterPlan) -> list[str]:
    """The servers' addresses."""
    count, name = plan.servers.count if plan.servers else 0, f"{plan.name}-servers"
    return [f"http://{name}-{index}.{name}:{SERVER_PORT}" for index in range(count)]


def _job(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    """Pods that are evicted do not count as failures."""
    limit = {"activeDeadlineSeconds": plan.seconds} if plan.seconds is not None else {}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "ranks", "operator": "In", "values": FINAL_CODES}},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(plan, options, plan.name, "ranks"),
        "spec": {
            "completionMode": "Indexed",
            "completions": plan.nodes,
            "parallelism": plan.nodes,
            "backoffLimit": plan.retries * plan.nodes,
            **limit,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": labels(plan, "ranks")}, "spec": _rank_pod(plan, options)},
        },
    }


def _rank_pod(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    container = {
        "name": "ranks",
        "image": options.image,
        "command": ["sh", str(FILES / "start.sh")],
        "workingDir": str(WORKSPACE),
        "env": [
            *variables(plan, _rank_variables(plan)),
            from_field("NODE_RANK", INDEX),
            from_field("POD_IP", "status.podIP"),
            *_token_variable(plan),
        ],
        **secrets(options),
        "ports": [{"name": "main", "containerPort": RENDEZVOUS_PORT}],
        "resources": resources(plan, plan.gpus, options),
        "volumeMounts": mounts(),
    }
    return {
        "restartPolicy": "Never",
        "subdomain": f"{plan.name}-ranks",
        "automountServiceAccountToken": False,
        **NO_SERVICE_LINKS,
        "terminationGracePeriodSeconds": STOP_S,
        **tolerations(plan),
        "containers": [container],
        "volumes": volumes(plan, options),
    }


def _worker_token(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(plan, options, f"{plan.name}-workers"),
        "stringData": {"token": token_urlsafe(24)},
    }


def _token_variable(plan: ClusterPlan) -> list[dict[str, Any]]:
    source = {"secretKeyRef": {"name": f"{plan.name}-workers", "key": "token"}}
    return [{"name": TOKEN_VARIABLE, "valueFrom": source}] if plan.workers else []


def _rank_variables(plan: ClusterPlan) -> dict[str, str]:
    """What the start scripts read."""
    return {
        "MTRL_JOB": plan.name,
        "MTRL_FILES": str(FILES),
        "MTRL_RUN": str(plan.run_folder),
        "MTRL_LOGS": str(plan.logs),
        "MTRL_ENGINE": ",".join(server_urls(plan)),
        "MTRL_SERVERS_START_S": str(SERVERS_START_S),
        "MTRL_NODES": str(plan.nodes),
        "MTRL_RANKS_EACH": str(plan.ranks_each),
        "MTRL_RETRIES": str(plan.retries),
        "MTRL_WORKERS": str(plan.workers),
        "MTRL_WORKERS_PORT": str(WORKERS_PORT),
        "MTRL_WORKERS_SILENT_S": str(plan.silent_s),
        "MTRL_RENDEZVOUS": f"{plan.name}-0.{plan.name}-ranks:{RENDEZVOUS_PORT}",
    }


def _readme(plan: ClusterPlan, options: PodOptions) -> str:
    space = f"-n {options.namespace} " if options.namespace else ""
    claim = claim_name(plan, options)
    return f"""# {plan.name} on Kubernetes

Made by `mtrl-train render kubernetes`; render again rather than edit.

- **Before**: the volume `{claim}` must hold what the run file names by relative paths: the model, the data, the tools.
  Copy them there with a pod that mounts it, or fill it as your storage allows; it appears as `{WORKSPACE}`.
- **Submit**: `kubectl apply -f .` in this folder.
- **Order**: the servers and the trainer's pods start together; the ranks begin once all servers answer.
- **Watch**: `kubectl {space}logs -f job/{plan.name}` and
  `kubectl {space}get pods -l app.kubernetes.io/instance={plan.name}`
- **Logs**: on the volume, `{plan.logs}`: a file for each rank, server and rollout worker. `kubectl logs` has those of
  ranks and servers, too.
- **Run**: `{plan.run_folder}` on the volume.
- **Resume**: by itself, after a failure of a rank (up to {plan.retries} times) or an evicted pod. By hand:
  `kubectl {space}delete job {plan.name}`, then apply again.
- **End**: servers keep their GPUs until `kubectl delete -f 3-servers.yaml`. Deleting `2-volume.yaml` deletes the run.
"""
