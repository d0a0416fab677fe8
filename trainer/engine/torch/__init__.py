"""The embedded engine: continuous batching and a cache of shared prefixes, on a model in this process."""

from __future__ import annotations

from trainer.engine.torch.torch_engine import TorchEngine

__all__ = ["TorchEngine"]
