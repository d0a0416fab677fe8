"""Every block of docs/scaling.md does what it says."""

from __future__ import annotations

from pathlib import Path

from tests.docs.conftest import Follow
from tests.plugins.cluster.manifests import read_manifests, validate


def test_scaling_page(follow: Follow) -> None:
    follow("docs/scaling.md")
    assert Path("slurm/job.sbatch").is_file()
    for manifest in read_manifests(Path("k8s")).values():
        validate(manifest)
