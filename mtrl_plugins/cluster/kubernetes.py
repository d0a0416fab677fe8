"""Renders Kubernetes manifests: an indexed Job for the ranks, a StatefulSet for SGLang servers, a shared volume."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from secrets import token_urlsafe
from typing import Any

import yaml

from gateway.errors import ConfigError
from mtrl_plugins.cluster.cluster_plan import (
    RENDEZVOUS_PORT,
    SANDBOXES_PORT,
    SERVER_PORT,
    SERVERS_START_S,
    STOP_S,
    ClusterPlan,
    ServerRole,
    check_text,
    hash_token,
)
from mtrl_plugins.sandboxes.settings import SANDBOX_TOKEN_VARIABLE, SANDBOXES_VARIABLE
from trainer.distributed.rank_environment import NOT_AGAIN

Manifest = Mapping[str, Any]

WORKSPACE = PurePosixPath("/workspace")
"""Where the shared volume is mounted: the working folder of every container."""
FILES = PurePosixPath("/etc/mtrl")
"""Where the run file and the start scripts are mounted."""
MAX_CONFIG_MAP = 1_000_000
"""Bytes of a ConfigMap; Kubernetes refuses more than 1 MiB."""
NO_SERVICE_LINKS = {"enableServiceLinks": False}
"""A Service of the namespace called `sglang` would set SGLANG_PORT, which SGLang reads."""
_AMBIGUOUS = re.compile(r"[-+]?[.\d].*|[yYnN]", re.DOTALL)
"""Texts that some YAML readers, but not PyYAML, take for a number or a boolean: `1e3`, `y`."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")


@dataclass(frozen=True)
class PodOptions:
    """What only Kubernetes needs to know."""

    image: str
    """An image with mtrl."""
    namespace: str | None = None
    storage_class: str | None = None
    """Of the volume; by default the cluster's. It must offer volumes that many nodes write."""
    storage: str = "500Gi"
    claim: str | None = None
    """An existing claim to use instead of a new one."""
    secret: str | None = None
    """A Secret whose keys become variables, such as HF_TOKEN."""
    cpus: str | None = None
    """CPUs of a trainer pod."""
    memory: str | None = None
    """Memory of a trainer pod."""

    def check(self) -> None:
        """Raises for what Kubernetes would refuse."""
        names = {"--namespace": self.namespace, "--storage-class": self.storage_class}
        names |= {"--claim": self.claim, "--secret": self.secret}
        for option, name in names.items():
            if name is not None and not _LABEL.fullmatch(name):
                remedy = "use small letters, digits and dashes, up to 63"
                raise ConfigError(f"{name!r} is no name in Kubernetes", field=option, remedy=remedy)
        for option, quantity in {"--storage": self.storage, "--cpus": self.cpus, "--memory": self.memory}.items():
            if quantity is not None and not _QUANTITY.fullmatch(quantity):
                remedy = "write a number with a unit, such as 500Gi, or 16 for CPUs"
                raise ConfigError(f"{quantity!r} is no quantity in Kubernetes", field=option, remedy=remedy)
        check_image("--image", self.image)


def check_image(option: str, image: str) -> None:
    """Refuses what is no image's name."""
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f"{image!r} is no image", field=option, remedy="write REGISTRY/NAME:TAG")


def metadata(plan: ClusterPlan, options: PodOptions, name: str, role: str = "") -> dict[str, Any]:
    """The metadata of an object of the job."""
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **namespace, "labels": labels(plan, role)}


def labels(plan: ClusterPlan, role: str = "") -> dict[str, str]:
    """The labels of a role's objects and pods."""
    parts = {"app.kubernetes.io/name": "mtrl", "app.kubernetes.io/instance": plan.name}
    return parts | ({"app.kubernetes.io/component": role} if role else {})


def files_map(plan: ClusterPlan, options: PodOptions, scripts: Mapping[str, Path]) -> dict[str, Any]:
    """A ConfigMap with the run file and the start scripts."""
    try:
        data = {"run.yaml": plan.run_file.read_text(encoding="utf-8")}
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8", file=plan.run_file, remedy="save it as UTF-8") from error
    data |= {name: script.read_text(encoding="utf-8") for name, script in scripts.items()}
    if sum(len(text.encode()) for text in data.values()) > MAX_CONFIG_MAP:
        raise ConfigError("is too large for a ConfigMap (1 MB)", file=plan.run_file, remedy="move long texts to files")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(plan, options, f"{plan.name}-files"),
        "data": data,
    }


def claim_name(plan: ClusterPlan, options: PodOptions) -> str:
    """The claim of the shared volume."""
    return options.claim or f"{plan.name}-workspace"


def volume_claim(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    """A claim of a volume that all nodes write: models, data, tools and the run's folder."""
    storage_class = {"storageClassName": options.storage_class} if options.storage_class else {}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(plan, options, claim_name(plan, options)),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            **storage_class,
            "resources": {"requests": {"storage": options.storage}},
        },
    }


def volumes(plan: ClusterPlan, options: PodOptions) -> list[dict[str, Any]]:
    """The volumes of every pod; processes exchange tensors through shared memory, of which containers have little."""
    return [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": claim_name(plan, options)}},
        {"name": "files", "configMap": {"name": f"{plan.name}-files"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def mounts() -> list[dict[str, Any]]:
    """Where the volumes are."""
    return [
        {"name": "workspace", "mountPath": str(WORKSPACE)},
        {"name": "files", "mountPath": str(FILES), "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - a mount, not a temporary file
    ]


def variables(plan: ClusterPlan, own: Mapping[str, str]) -> list[dict[str, Any]]:
    """Environment variables; `$(NAME)` in a value stays as it is."""
    return [{"name": name, "value": _literal(value)} for name, value in {**plan.environment, **own}.items()]


def from_field(name: str, path: str) -> dict[str, Any]:
    """A variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def arguments(words: Iterable[str]) -> list[str]:
    """Arguments of a container, in which Kubernetes expands nothing."""
    return [_literal(word) for word in words]


def _literal(text: str) -> str:
    """Kubernetes replaces `$(NAME)` in arguments and values, and writes each `$$` as one dollar sign."""
    if "\0" in text:
        raise ConfigError(f"{text!r} has a null character", field="--env", remedy="leave it out")
    return text.replace("$", "$$")


def secrets(options: PodOptions) -> dict[str, Any]:
    """The Secret's keys as variables, if one is named."""
    return {"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}


def resources(plan: ClusterPlan, gpus: int, options: PodOptions | None = None) -> dict[str, Any]:
    """GPUs, and for trainer pods the CPUs and memory that were asked for."""
    asked = {"cpu": options.cpus, "memory": options.memory} if options else {}
    requests = {name: value for name, value in asked.items() if value is not None}
    limits = {"nvidia.com/gpu": str(gpus)} if plan.gpus else {}
    return {"requests": requests | limits, "limits": limits}


def tolerations(plan: ClusterPlan) -> dict[str, Any]:
    """Nodes with GPUs are often reserved for pods that use them."""
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    return {"tolerations": [taint]} if plan.gpus else {}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(head: Sequence[str], *manifests: Manifest) -> str:
    """A file of manifests below a comment."""
    for line in head:
        check_text("a comment", line)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    texts = [yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, width=100) for manifest in manifests]
    return comment + "---\n".join(texts)


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
    if plan.servers:
        head = [
            f"{plan.servers.count} SGLang servers with {plan.servers.gpus} GPUs each, at addresses that stay.",
            "A server that ends is started again; the trainer notices and gives it the current weights.",
        ]
        service = _headless(plan, options, "servers", SERVER_PORT)
        files["3-servers.yaml"] = to_yaml(head, service, _stateful_set(plan, plan.servers, options, server_image))
    if plan.sandboxes:
        head = [
            f"{plan.sandboxes} servers of sandboxes, and their token. Keep this file to yourself.",
            "They are privileged, as sandboxes need namespaces and mounts: give them nodes of their own if you can.",
        ]
        service, token = _headless(plan, options, "sandboxes", SANDBOXES_PORT), _token(plan, options)
        files["3-sandboxes.yaml"] = to_yaml(
            head, token, service, _sandboxes(plan, options, token["stringData"]["token"])
        )
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
            "publishNotReadyAddresses": role != "sandboxes",
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


def _sandboxes(plan: ClusterPlan, options: PodOptions, secret: str) -> dict[str, Any]:
    """Servers of sandboxes, which keep nothing, see no volume, and are spread over nodes."""
    token, role = PurePosixPath("/etc/mtrl-sandboxes"), labels(plan, "sandboxes")
    words = ("mtrl-gateway", "sandboxes", "--host", "0.0.0.0", "--port", str(SANDBOXES_PORT))  # noqa: S104 - a pod
    container = {
        "name": "sandboxes",
        "image": options.image,
        "command": [*words, "--token-file", str(token / "token")],
        "ports": [{"name": "main", "containerPort": SANDBOXES_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SANDBOXES_PORT}, "periodSeconds": _READY_S},
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "token", "mountPath": str(token), "readOnly": True}],
    }
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    spec = {
        "automountServiceAccountToken": False,
        **NO_SERVICE_LINKS,
        "topologySpreadConstraints": [{**spread, "labelSelector": {"matchLabels": role}}],
        "containers": [container],
        "volumes": [{"name": "token", "secret": {"secretName": f"{plan.name}-sandboxes"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(plan, options, f"{plan.name}-sandboxes", "sandboxes"),
        "spec": {
            "replicas": plan.sandboxes,
            "selector": {"matchLabels": role},
            "template": {"metadata": {"labels": role, "annotations": {"mtrl/token": hash_token(secret)}}, "spec": spec},
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
            *(_token_variable(plan) if plan.sandboxes else ()),
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


def _token(plan: ClusterPlan, options: PodOptions) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(plan, options, f"{plan.name}-sandboxes"),
        "stringData": {"token": token_urlsafe(24)},
    }


def _token_variable(plan: ClusterPlan) -> list[dict[str, Any]]:
    source = {"secretKeyRef": {"name": f"{plan.name}-sandboxes", "key": "token"}}
    return [{"name": SANDBOX_TOKEN_VARIABLE, "valueFrom": source}]


def _rank_variables(plan: ClusterPlan) -> dict[str, str]:
    """What the start scripts and tool files read."""
    sandboxes = {SANDBOXES_VARIABLE: f"http://{plan.name}-sandboxes:{SANDBOXES_PORT}"} if plan.sandboxes else {}
    return sandboxes | {
        "MTRL_JOB": plan.name,
        "MTRL_FILES": str(FILES),
        "MTRL_RUN": str(plan.run_folder),
        "MTRL_LOGS": str(plan.logs),
        "MTRL_ENGINE": ",".join(server_urls(plan)),
        "MTRL_SERVERS_START_S": str(SERVERS_START_S),
        "MTRL_NODES": str(plan.nodes),
        "MTRL_RANKS_EACH": str(plan.ranks_each),
        "MTRL_RETRIES": str(plan.retries),
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
- **End**: servers, those of sandboxes too, stay until `kubectl delete -f FILE`. Deleting `2-volume.yaml` deletes the
  run.
"""
