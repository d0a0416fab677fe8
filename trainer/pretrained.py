"""Reads a model's folder with transformers and peft: the only module that does.

Nothing is read from a network. Code of the folder runs only after `trust_code`, which the setting `trust_remote_code`
asks for: to name a folder is not to trust it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gateway.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

CODE_KEY = "auto_map"
"""Where a folder's files name classes of its own code."""
CODE_SETTING = "trust_remote_code"
FILES_WITH_CODE = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")

_trusted: set[Path] = set()


class ModelCodeError(ConfigError):
    """A model that only code of its own folder can load."""

    def __init__(self, folder: Path, classes: str) -> None:
        super().__init__(
            f"the model needs Python code of its own folder, which never runs unasked (`{CODE_KEY}`: {classes})",
            file=folder,
            field="model",
            remedy=f"read that code, and then set `{CODE_SETTING}: true`; or name a model that transformers knows",
        )


def trust_code(*folders: str | Path) -> None:
    """Lets this process run code of these folders, and of those in them, such as a run's checkpoints."""
    _trusted.update(Path(folder).resolve() for folder in folders)


def trusts_code(folder: Path) -> bool:
    """Whether code of a folder may run."""
    folder = folder.resolve()
    return not _trusted.isdisjoint((folder, *folder.parents))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file, such as a model's configuration; an empty one where there is none: whoever needs the file
    says what is wrong with it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def load_config(folder: Path) -> PretrainedConfig:
    """The configuration of a model."""
    from transformers import AutoConfig

    return cast("PretrainedConfig", _read(AutoConfig, folder))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A model's tokenizer."""
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerFast", _read(AutoTokenizer, folder))


def load_weights(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model with its weights, and with its vision encoder if it has one."""
    return cast("PreTrainedModel", _read(_model_class(load_config(folder)), folder, dtype=dtype))


def make_model(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of a folder's configuration, with weights as transformers initialises them."""
    config = load_config(folder)
    return cast("PreTrainedModel", _model_class(config).from_config(config, dtype=dtype, **_trust(folder)))


def load_image_processor(kind: Any, folder: Path) -> Any:
    """A model's image processor, of a class of transformers."""
    return kind.from_pretrained(folder, local_files_only=True)


def load_adapter_config(folder: Path) -> PeftConfig:
    """The configuration of adapters."""
    from peft import PeftConfig

    return cast("PeftConfig", PeftConfig.from_pretrained(str(folder)))


def _read(kind: Any, folder: Path, **options: Any) -> Any:
    """What a class of transformers reads from the folder."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options, **_trust(folder))
    except ValueError as error:
        if CODE_SETTING in str(error) and (classes := ", ".join(_named_classes(folder))):
            raise ModelCodeError(folder, classes) from error
        raise


def _model_class(config: PretrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _trust(folder: Path) -> dict[str, bool]:
    """What transformers is told. Left out, it asks at the terminal, and runs the code at a `yes`."""
    return {CODE_SETTING: trusts_code(folder)}


def _named_classes(folder: Path) -> Iterator[str]:
    """The classes of its own code that a folder names."""
    for name in FILES_WITH_CODE:
        if isinstance(named := read_json(folder / name).get(CODE_KEY), dict):
            yield from (f"{name}: {kind}={path}" for kind, path in named.items())
