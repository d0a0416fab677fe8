"""Reads rendered manifests, and holds them against the schemas of Kubernetes and KubeRay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

VERSIONS = ("1.31", kubernetes_validate.latest_version())
"""The oldest release that is promised, and the newest one whose schemas are here."""


def read_manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """The objects of a rendered folder, by kind and name."""
    documents = [doc for file in sorted(folder.glob("*.yaml")) for doc in yaml.safe_load_all(file.read_text())]
    return {f"{doc['kind']}/{doc['metadata']['name']}": doc for doc in documents}


def validate(manifest: dict[str, Any], versions: Sequence[str] = VERSIONS) -> None:
    """Raises for fields that the schemas do not know, and for values of another type."""
    if manifest["kind"] == "RayJob":
        _validate_ray_job(manifest, versions)
        return
    for version in versions:
        kubernetes_validate.validate(manifest, version, strict=True)


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD_TEMPLATE = {"type": "object"}
HEAD = _object(("template",), rayStartParams=TEXTS, template=POD_TEMPLATE)
WORKERS = _object(
    ("groupName", "maxReplicas", "minReplicas", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
)
RAY_JOB = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object(("name",), name=TEXT, namespace=TEXT, labels=TEXTS),
    spec=_object(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=COUNT,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=_object(
            ("headGroupSpec",),
            rayVersion=TEXT,
            headGroupSpec=HEAD,
            workerGroupSpecs={"type": "array", "items": WORKERS},
        ),
    ),
)
"""The part of KubeRay's CRD (ray.io/v1) that is rendered, after its documentation: no package carries the CRD. Pod
templates, most of it, are held against Kubernetes' own schemas."""


def _validate_ray_job(manifest: dict[str, Any], versions: Sequence[str]) -> None:
    jsonschema.validate(manifest, RAY_JOB)
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        validate(pod, versions)
