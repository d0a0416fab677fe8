"""Parts of Kubernetes manifests that plain Kubernetes and KubeRay share: metadata, volumes, containers, YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gateway.errors import ConfigError
from mtrl_plugins.cluster.cluster_plan import ClusterPlan, check_text

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
