"""Loads a model from a local folder, with errors that say how to mend it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from gateway.errors import OperatorError
from trainer.pretrained import ModelCodeError, load_weights, make_model, read_json


def configure_torch() -> None:
    """Turns off transformers' progress bars and limits torch to one thread in this process."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # More are slower for models that fit a machine without a GPU.


COMPUTE_DEVICE = "_compute_device"
"""The attribute of a model whose weights are kept on another device than it computes on."""


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that a model computes on."""
    device: torch.device = getattr(model, COMPUTE_DEVICE, None) or model.device
    return device


SHARDS_FOLDER = "shards"
"""In a checkpoint that several ranks wrote: their tensors."""


def require_whole_model(folder: Path) -> None:
    """Raises OperatorError for a checkpoint that no model can be loaded from as it is."""
    if (folder / SHARDS_FOLDER).is_dir():
        remedy = f"write a model's folder from it with `mtrl-train export {folder} --out FOLDER`, and name that one"
        raise OperatorError(f"{folder}: is a checkpoint that several ranks wrote; {remedy}")


def require_plain_weights(folder: Path) -> None:
    """Raises OperatorError for a model whose weights are quantised: without their scales, they are other weights."""
    if method := _read_quantization(folder):
        remedy = "name the folder of the model that they were made from"
        raise OperatorError(f"{folder}: its weights are quantised ({method}) and cannot be trained; {remedy}")


def _read_quantization(folder: Path) -> str:
    """How a model's stored weights are quantised, such as `fp8`; empty if they are not."""
    config = read_json(folder / "config.json")
    quantization = config.get("quantization_config") or config.get("compression_config")
    return str(quantization.get("quant_method", "unknown")) if isinstance(quantization, dict) else ""


def load_model(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The language model in a folder, in evaluation mode, with its vision encoder if it has one."""
    folder = Path(path)
    require_whole_model(folder)
    require_plain_weights(folder)
    if not (folder / "config.json").is_file():
        raise OperatorError(f"{folder}: no config.json here; give the folder of a Hugging Face model")
    try:
        model = load_weights(folder, dtype)
    except ModelCodeError:
        raise
    except Exception as error:  # Several libraries read weights, each with its own errors.
        raise OperatorError(
            f"{folder}: cannot be loaded as a causal language model: {error}; copy the folder again"
        ) from error
    torch.nn.Module.to(model, device)
    model.train(False)
    return model


def build_skeleton(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with weights that nothing was written to, which take no memory until then; its buffers are computed."""
    if not (folder / "config.json").is_file():
        raise OperatorError(f"{folder}: no config.json here; give the folder of a Hugging Face model")
    with no_init_weights():
        model = make_model(folder, dtype)
    model.tie_weights()  # A part of the initialisation that was skipped.
    model.train(False)
    return model
