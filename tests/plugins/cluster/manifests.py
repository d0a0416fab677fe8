"""Reads rendered manifests, and holds them against the schemas of Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    for version in versions:
        kubernetes_validate.validate(manifest, version, strict=True)
