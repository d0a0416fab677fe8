"""The Dockerfiles: what they copy exists and is sent to the builder, and their pins are the tested ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.engine.sglang.launch import TESTED

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".ci/docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_all_that_a_dockerfile_copies_exists_and_is_not_ignored(file: Path) -> None:
    copied = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY ")]
    sent = {line[1:] for line in Path(f"{file}.dockerignore").read_text().splitlines() if line.startswith("!")}
    names = {name for names in copied for name in names}
    assert names
    assert names <= sent
    assert all((ROOT / name).exists() for name in names)


def test_the_training_image_has_a_tested_release_of_sglang() -> None:
    assert any(f"sglang=={release} " in (ROOT / ".ci/docker/train.Dockerfile").read_text() for release in TESTED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_images_have_every_package(file: Path) -> None:
    packages = {folder.parent.name for folder in ROOT.glob("*/py.typed")}
    assert packages == {"gateway", "mtrl_plugins", "trainer"}
    assert all(f"COPY {package} " in file.read_text() for package in packages)
