"""The model of a trainer: a folder, a name on the Hugging Face hub, a loaded model, or the demo's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError
from trainer.train.settings import DEMO

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
INITIAL_MODEL = "initial_model"
"""The folder in a run in which a loaded model is saved."""
TEXT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def name_model(model: Any, run: Path, processing_class: Any = None) -> str:
    """The setting `model` for what a trainer was given. A loaded model is saved into the run's folder first."""
    if model is None:
        return DEMO
    if isinstance(model, str | Path):
        if processing_class is not None:
            remedy = "leave it out: the model's folder has its own"
            raise ConfigError("goes with a loaded model only", field="processing_class", remedy=remedy)
        return str(_find_folder(str(model)))
    if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):
        remedy = "pass a model's folder, and adapters as `peft_config`"
        raise ConfigError(f"is a {type(model).__name__}", field="model", remedy=remedy)
    folder = run / INITIAL_MODEL
    if not (folder / "config.json").exists():
        if processing_class is None:
            remedy = "pass the model's tokenizer or processor, or the model's folder"
            raise ConfigError("is needed beside a loaded model", field="processing_class", remedy=remedy)
        model.save_pretrained(folder)
        processing_class.save_pretrained(folder)
    return str(folder)


def _find_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.exists() or not HUB_NAME.fullmatch(name):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # boundary: the network and the hub may fail in any way
        problem = f"{name!r} is no folder here, and cannot be fetched ({type(error).__name__})"
        raise ConfigError(problem, field="model", remedy="download the model, and pass its folder") from error


def text_template(model: str, prompts: Iterable[str]) -> str:
    """A chat template for prompts that are texts: the policy continues them as they are.

    It begins with the token that the model's tokenizer puts before every text, if there is one. Raises ConfigError if a
    chat template was applied to the prompts already, since control tokens in data are read as plain text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):  # The demo, or a folder whose problems are reported later.
        return TEXT_TEMPLATE
    for prompt in prompts:
        if token := next((token for token in tokenizer.all_special_tokens if token in prompt), None):
            problem = f"a prompt holds the control token {token!r}, as if a chat template was applied to it"
            raise ConfigError(problem, field="train_dataset", remedy="pass the messages themselves as `prompt`")
    begins = bool(tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    return ("{{ bos_token }}" if begins else "") + TEXT_TEMPLATE
