"""The cache of demo models: each is built and warm-started once per recipe."""

from __future__ import annotations

import os
import shutil
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from mtrl_plugins.demo.demos import load_demo
from mtrl_plugins.demo.warm_start import Progress, Recipe, warm_start
from trainer import algorithms, policy
from trainer.model import load_model
from trainer.storage.temporary_folder import TemporaryFolder

SOURCES = [Path(__file__).parent, *(Path(package.__file__ or "").parent for package in (algorithms, policy))]
"""The folders with the source of what a warm start does."""


def cache_folder() -> Path:
    """The user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "mtrl"


def find_or_build_model(
    recipe: Recipe | None = None, cache: Path | None = None, report: Progress = lambda *_: None
) -> Path:
    """The folder of the warm-started model. While it is built, `report` is called with step, steps and loss."""
    recipe, cache = recipe or Recipe(), cache or cache_folder()
    folder = cache / f"{recipe.demo}-{recipe_digest(recipe)}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder(cache) as temporary:
            move_into_place(_build_model(temporary.path / "model", recipe, report), folder)
    return folder


def recipe_digest(recipe: Recipe) -> str:
    """Digests what determines the weights: the recipe, the source of the demos and the trainer's step, and versions."""
    digest = sha256(repr(recipe).encode())
    for name in ("torch", "transformers", "tokenizers"):
        digest.update(version(name).encode())
    for package in SOURCES:
        for file in sorted([*package.rglob("*.py"), *package.rglob("*.jinja")]):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _build_model(folder: Path, recipe: Recipe, report: Progress) -> Path:
    demo = load_demo(recipe.demo)
    demo.build_model(folder, recipe.seed)
    model = load_model(folder)
    warm_start(model, demo.build_warm_start(folder), recipe, report)
    model.save_pretrained(folder)
    return folder


def move_into_place(built: Path, folder: Path) -> None:
    """Renames the complete folder. If another process was first, its folder is used."""
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(built)
