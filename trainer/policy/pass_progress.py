"""How far a pass with a gradient is, by the decoder layers that it went through forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

BACKWARD, RECOMPUTED = 2, 3
"""The cost of a layer's backward pass as a multiple of its forward pass; with gradient checkpointing."""


class PassProgress:
    """Follows passes of a model, of which a large one takes minutes on a CPU."""

    def __init__(self, model: Any, *, checkpointing: bool) -> None:
        body = getattr(model.base_model, "language_model", model.base_model)
        self._layers = list(getattr(body, "layers", ()))
        self._backward_cost = RECOMPUTED if checkpointing else BACKWARD
        layer = sum(value.numel() for value in self._layers[0].parameters()) if self._layers else 1
        head = sum(value.numel() for value in model.get_output_embeddings().parameters())
        self._head_cost: float = (1 + BACKWARD) * head / layer
        self._forward = self._backward = 0

    @property
    def share(self) -> float:
        """The share of the pass that is done, from 0 to 1."""
        done: float = self._forward
        if self._backward:  # The first gradient is that of the head's input.
            done += self._head_cost + self._backward_cost * (self._backward - 1)
        return done / (len(self._layers) * (1 + self._backward_cost) + self._head_cost)

    @contextmanager
    def follow(self, on_share: Callable[[float], None]) -> Iterator[None]:
        """Calls the function with the share that is done, after each layer of a pass that is made meanwhile."""
        self._forward = self._backward = 0

        def on_gradient(gradient: Tensor) -> None:
            self._backward += 1
            on_share(self.share)

        def on_output(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if self._backward or not hidden.requires_grad:  # Gradient checkpointing computes it again.
                return
            self._forward += 1
            hidden.register_hook(on_gradient)
            on_share(self.share)

        handles = [layer.register_forward_hook(on_output) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
