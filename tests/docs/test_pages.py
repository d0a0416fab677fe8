"""Follows the pages that have no test file of their own: every block does what it says."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from gateway.sandbox.roots import add_root
from mtrl_plugins.environments.host_process import stop_hosts
from tests.docs.conftest import Follow
from tests.plugins.cluster.manifests import read_manifests, validate
from tests.plugins.verifiers.verifiers_runs import STAND_IN
from tests.sandbox.roots import export, make_tree

PAGES = (
    "docs/authorization.md", "docs/engines.md", "docs/modes.md", "docs/templates.md", "docs/troubleshooting.md",
    "docs/vision.md", "docs/watching.md",
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_every_block_does_what_it_says(page: str, follow: Follow) -> None:
    follow(page)


@pytest.mark.parametrize("page", ["docs/index.md", "docs/results.md"])
def test_every_command_is_a_make_target_or_a_benchmark(page: str, follow: Follow) -> None:
    assert all(item.command.startswith(("make ", "python -m bench.")) for item in follow(page).done)


@pytest.mark.parametrize("page", ["docs/environments.md", "docs/made-tasks.md"])
def test_every_block_does_what_it_says_without_the_shipped_servers(page: str, follow: Follow) -> None:
    follow(page, no_servers=True)


def test_quickstart(follow: Follow) -> None:
    done = follow("docs/quickstart.md")
    assert all("(the small job stands in)" in done[job] for job in ("--config second", "--config sight"))
    assert "policy, turn 0" in done["why runs/default 0 25"]
    assert "; 0 differ" in done["replay"] and "the loss is" in done["replay"]


def test_concepts_page(follow: Follow) -> None:
    assert "; 0 differ" in follow("docs/concepts.md")["replay"]


def test_tools_page(follow: Follow) -> None:
    listed = follow("docs/tools.md", no_servers=True)["mtrl-gateway list --tools my_tools "]
    assert listed.count("my_tools/") == 8  # in the whole list, and in its two columns
    assert all(name in listed for name in ("count", "roll", "look", "paint"))
    assert list(Path("tmp/painted").glob("*.png"))


def test_interactions_page(follow: Follow) -> None:
    listed = follow("docs/interactions.md", no_servers=True)["mtrl-gateway list"]
    wanted = ("gsm8k", "lenient", "polite", "judge", "caller", "traveller", "code")
    assert {*re.findall(r"feedback_\w+", listed)} == {f"feedback_{name}" for name in wanted}


def test_sandboxes_page(follow: Follow) -> None:
    done = follow("docs/sandboxes.md", no_servers=True)
    assert "3628800" in done["mtrl-gateway call --tools my_tools python "]
    assert "42" in done["mtrl-gateway call --tools my_tools evaluate "]


def test_your_own_job(follow: Follow) -> None:
    done = follow("docs/your-own-job.md")
    assert "count" in done["mtrl-gateway list"] and "feedback_customer" in done["mtrl-gateway list"]
    assert "4 of 4 rollouts" in done["mtrl-train rollout"] and "torch engine" in done["mtrl-train rollout"]
    assert "shop-0" in done["show runs/look "] and "not trained" in done["why runs/look"]
    assert "0 of them differ" in done["replay runs/look"]
    assert "no problems found" in done["--dry-run"]
    assert Path("models/shop-assistant/model.safetensors").is_file()


def test_scaling_page(follow: Follow) -> None:
    follow("docs/scaling.md")
    assert Path("slurm/job.sbatch").is_file()
    for manifest in read_manifests(Path("k8s")).values():
        validate(manifest)


def test_harbor_page(follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    add_root("busybox-1.37", export(make_tree(tmp_path / "tree"), tmp_path / "box.tar"))
    done = follow("docs/harbor.md", no_servers=True)
    assert "1 task of tasks; public hosts: none; the solutions of answer are worth 1" in done["mtrl-train --config"]


@pytest.mark.parametrize(
    ("page", "reward"), [("docs/migration-verl.md", "custom"), ("docs/migration-swift.md", "solved")]
)
def test_migration_page_is_followed_where_the_framework_is_not_installed(
    page: str, reward: str, follow: Follow
) -> None:
    assert importlib.util.find_spec("verl") is None and importlib.util.find_spec("swift") is None
    done = follow(page, no_servers=True)
    assert "Same meaning" in done["translate"] and " -> " in done["translate"]
    assert f'"reward/{reward}"' in Path("runs/moved/metrics.jsonl").read_text(encoding="utf-8")
    assert "policy" in done["mtrl-train show"]


def test_migration_verifiers_page(follow: Follow) -> None:
    """A Python that has the stand-in of verifiers is where the page installs the real one."""
    python = Path("my_verifiers/bin/python")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_IN} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = follow("docs/migration-verifiers.md", no_servers=True)
    stop_hosts()
    steps = [json.loads(line) for line in Path("runs/moved/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all("reward/environment" in step and not step["reward/failed"] for step in steps)
    assert "price" in done["mtrl-train show"]
