"""A demo's model is made once for each recipe, and found again by it."""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from trainer.demo.demos import demo
from trainer.demo.warm import Recipe, Told, warm
from trainer.model import load_model


def cache() -> Path:
    """Where such things are kept for a user."""
    kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(kept) / "mtrl"


def made(recipe: Recipe | None = None, kept: Path | None = None, told: Told = lambda *_: None) -> Path:
    """The folder of the warm-started model; where it must be made, `told` hears step, of how many, and loss."""
    recipe, kept = recipe or Recipe(), kept or cache()
    folder = kept / f"{recipe.demo}-{digest(recipe)}"
    if not folder.is_dir():
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as beside:
            _publish(_make(Path(beside) / "model", recipe, told), folder)
    return folder


def digest(recipe: Recipe) -> str:
    """Of all that decides the weights: the recipe, this package, and those whose arithmetic it uses."""
    told = sha256(repr(recipe).encode())
    for name in ("torch", "transformers", "tokenizers"):
        told.update(version(name).encode())
    here = Path(__file__).parent
    for file in sorted([*here.rglob("*.py"), *here.rglob("*.jinja")]):
        told.update(file.name.encode() + file.read_bytes())
    return told.hexdigest()[:16]


def _make(folder: Path, recipe: Recipe, told: Told) -> Path:
    chosen = demo(recipe.demo)
    chosen.build(folder, recipe.seed)
    model = load_model(folder)
    warm(model, chosen.school(folder), recipe, told)
    model.save_pretrained(folder)
    return folder


def _publish(whole: Path, folder: Path) -> None:
    """A folder that is there is whole; whoever comes second keeps the first."""
    try:
        whole.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(whole)
