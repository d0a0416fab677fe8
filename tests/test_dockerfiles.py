"""The Dockerfiles, the compose file and the unit of systemd: what they name exists, and linters accept them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from gateway.cli import app
from gateway.http.security import PUBLIC_PATHS
from trainer.engine.sglang.launch import TESTED

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".ci/docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_all_that_a_dockerfile_copies_exists_and_is_not_ignored_and_has_every_package(file: Path) -> None:
    copied = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY ")]
    sent = {line[1:] for line in Path(f"{file}.dockerignore").read_text().splitlines() if line.startswith("!")}
    names = {name for names in copied for name in names}
    assert names
    assert names <= sent
    assert all((ROOT / name).exists() for name in names)
    packages = {folder.parent.name for folder in ROOT.glob("*/py.typed")}
    assert packages == {"gateway", "mtrl_plugins", "trainer"} <= names


def test_the_training_image_has_a_tested_release_of_sglang() -> None:
    assert any(f"sglang=={release} " in (ROOT / ".ci/docker/train.Dockerfile").read_text() for release in TESTED)


def test_the_image_for_a_cluster_has_the_torch_that_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    from trainer.distributed.errors import RankError
    from trainer.distributed.sharded_model import require_torch

    require_torch()
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(RankError) as raised:
        require_torch()
    needed = re.search(r"install torch ([\d.]+)", raised.value.remedy)
    assert needed and f"'torch>={needed[1]}'" in (ROOT / ".ci/docker/train.Dockerfile").read_text()
    assert "docker build -f .ci/docker/train.Dockerfile" in (ROOT / "docs/scaling.md").read_text()


def test_images_pass_the_linter() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None and platform.machine() != "x86_64":
        pytest.skip("hadolint comes for x86_64 alone")
    assert hadolint is not None
    done = subprocess.run([hadolint, *FILES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def options_of(command: list[str]) -> set[str]:
    """The options of a command line of `mtrl-gateway serve`, of which each must be known."""
    assert command[0].endswith("mtrl-gateway") and "serve" in command
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for each in (get_command(app), serve) for parameter in each.params for option in parameter.opts}
    used = {word for word in command if word.startswith("--")}
    assert used <= known
    return used


def test_compose_file_starts_the_image_with_a_token_and_waits_until_it_is_ready() -> None:
    service = yaml.safe_load((ROOT / ".ci/docker/compose.yaml").read_text())["services"]["gateway"]
    assert {"--token-file", "--log-json"} <= options_of(service["command"])
    assert service["command"][-1] == f"/run/secrets/{service['secrets'][0]}"
    folder = ROOT / ".ci/docker" / service["build"]["context"]
    assert (folder / service["build"]["dockerfile"]).resolve() == ROOT / ".ci/docker/gateway.Dockerfile"
    assert "/readyz" in PUBLIC_PATHS and "/readyz" in service["healthcheck"]["test"][-1]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = ROOT / ".ci/mtrl-gateway.service"
    line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    assert "--token-file" in options_of(line.removeprefix("ExecStart=").split())
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd is not installed")
    program = shutil.which("true")
    (tmp_path / unit.name).write_text(unit.read_text().replace("/srv/mtrl/.venv/bin/mtrl-gateway", str(program)))
    done = subprocess.run([analyze, "verify", tmp_path / unit.name], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
