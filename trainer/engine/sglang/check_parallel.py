"""Checks before a server starts that its tensor parallelism divides the model; SGLang itself fails minutes later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.engine.base import EngineError
from trainer.pretrained import read_json


def check_tensor_parallel(model: Path, size: int) -> None:
    """Raises EngineError if the model in a folder cannot be split over so many devices."""
    if size < 2:
        return
    config = read_json(model / "config.json")
    text = config.get("text_config") or config
    try:
        problems = list(_find_problems(text, size))
    except (ValueError, TypeError, AttributeError):
        return  # Whoever loads the model says what is wrong with its configuration.
    if problems:
        fitting = [str(other) for other in range(1, size) if not any(_find_problems(text, other))]
        raise EngineError(
            f"`serving.options` has --tp {size}, which does not divide {model.name}: {'; '.join(problems)}\n"
            f"  remedy: use --tp {fitting[-1]}, and `serving.replicas` for the other devices"
        )


def _find_problems(config: Mapping[str, Any], size: int) -> Iterator[str]:
    heads = int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % size:
        yield f"it has {heads} attention heads"
    if kv_heads and kv_heads % size and size % kv_heads:  # Fewer heads than devices are copied.
        yield f"it has {kv_heads} key-value heads"
    for name, what in (("hidden_size", "a hidden size"), ("intermediate_size", "an intermediate size")):
        if (width := int(config.get(name) or 0)) % size:
            yield f"it has {what} of {width}"
