"""How weights are moved: frozen, complete, nothing unknown let through. Field descriptions document it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from gateway.config.models import Frozen

Rate = Annotated[float, Field(gt=0, le=10)]
"""Of learning; beyond, there would be no numbers left after a step."""


class LoraSettings(Frozen):
    """Small matrices are learned beside the model's own, which stay as they are."""

    rank: PositiveInt = 16
    """The smaller side of each."""
    alpha: PositiveFloat = 32.0
    """They count alpha / rank times."""
    targets: tuple[str, ...] = ()
    """Layers by the end of their names, as `q_proj`; by default all linear ones but the head."""


class CriticSettings(Frozen):
    """Who says what to expect of a rollout, for `algorithm.credit.kind: gae`."""

    lr: Rate = 1e-3
    """Learning rate of its AdamW."""


class UpdateSettings(Frozen):
    """How the weights are moved."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` moves matrices by Muon and everything else by AdamW."""
    lr: Rate = 1e-3
    """Learning rate of AdamW."""
    muon_lr: Rate = 0.02
    """Learning rate of Muon."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of either optimizer."""
    warmup: NonNegativeInt = 0
    """Steps on which the rate rises to its full height."""
    steps: PositiveInt | None = None
    """Steps on which it then falls to `floor`; without it, the rate stays."""
    fall: Literal["line", "cosine"] = "line"
    """How it falls."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where it falls to, as a share of the full rate."""
    clip: PositiveFloat = 1.0
    """The gradient's norm at the most."""
    minibatches: PositiveInt = 1
    """Steps of the optimizer that a lesson is divided into."""
    epochs: PositiveInt = 1
    """How often a lesson is gone through."""
    tokens: PositiveInt = 8192
    """Tokens that are in memory at one time, gradients being gathered; a longer rollout goes alone."""
    chunk: PositiveInt = 1024
    """Tokens whose logits exist at one time: a large vocabulary needs no more memory than this."""
    checkpointing: bool = False
    """Layers are computed a second time rather than remembered: slower, in much less memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of products; weights and optimizer stay float32. `auto` is bfloat16 on a GPU which has it, else float32."""
    lora: LoraSettings | None = None
    """By default all weights are moved."""
    vision: Literal["auto", "trained", "frozen"] = "auto"
    """Whether a model that sees learns to see, too; `auto` is yes, but with `lora` it is no."""
    critic: CriticSettings | None = None
    """Needed for `algorithm.credit.kind: gae`, and for nothing else."""

    @property
    def looks(self) -> bool:
        """Whether it learns to see."""
        return self.vision == "trained" or (self.vision == "auto" and self.lora is None)
