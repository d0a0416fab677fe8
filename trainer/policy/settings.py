"""Settings of the weight update: optimizer, learning rate, micro-batches, precision, LoRA and the critic."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gateway.config.base import FrozenModel
from gateway.errors import OperatorError


class PolicyError(OperatorError):
    """A step that cannot be made, or a state that cannot be loaded. No weight has changed."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"


Checkpointing = bool | Literal["feed_forward"]
Rate = Annotated[float, Field(gt=0, le=10)]
"""A learning rate; with larger ones, weights overflow after a step."""
CRITIC_FACTOR = 10
"""The critic's learning rate, as a multiple of that with which all weights of the policy are trained."""
MICRO_BATCHES = (8192, 4096, 2048, 1024, 512)
"""Tokens of a micro-batch that a run chooses from; on a CPU, larger ones are no faster."""


class LoraSettings(FrozenModel):
    """Trains small adapter matrices instead of the model's own weights; `{}` does so with these defaults."""

    rank: PositiveInt = 16
    """The rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Adapters are scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """The layers that get adapters, by the end of their names, such as `q_proj`; by default all linear layers but the
    head, in a model of experts those of attention."""


class CriticSettings(FrozenModel):
    """The value model for `algorithm.credit.kind: gae`, which needs one; nothing else does."""

    lr: Rate | None = None
    """Learning rate of its AdamW; by default ten times that of all the policy's weights."""


class UpdateSettings(FrozenModel):
    """How the weights are updated."""

    lr: Rate | None = None
    """Learning rate of AdamW. By default by the number of parameters: 1e-4 below 50 million, 1e-5 below 500 million,
    2e-6 below 2 billion, else 1e-6; with `lora` ten times that."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    warmup_steps: NonNegativeInt | None = None
    """Steps over which the learning rate rises to its full value. By default 10, but at most a tenth of the run; 0 if
    you set `lr`."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up."""
    decay_steps: PositiveInt | None = None
    """The step at which a rate that falls reaches `min_lr_ratio`; by default the last step of the run."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The final learning rate, as a share of the full one."""
    max_grad_norm: PositiveFloat = 1.0
    """The largest norm of the gradient; larger ones are scaled down."""
    minibatches: PositiveInt = 1
    """Optimizer steps that a training step's batch is split into."""
    epochs: PositiveInt = 1
    """Passes over a training step's batch."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens of a micro-batch, of which a prefix that rollouts share counts once and an eighth for each further one;
    gradients are accumulated over micro-batches. A longer rollout is alone in one. By default 8192, or as
    many fewer as a machine of this size needs, which stay as they are when the run is resumed."""
    gradient_checkpointing: Checkpointing = False
    """Recomputes activations in the backward pass, which is slower but saves much memory; `feed_forward`: only those of
    feed-forward parts, most of a layer's, and keeps those of attention."""
    compile: bool = False
    """Compiles decoder layers, and the work on logits, with `torch.compile` in the first step, which takes a minute or
    more and makes the others faster on a GPU; unmeasured. In one process, without `gradient_checkpointing: true`."""
    logits_chunk: PositiveInt = 1024
    """As many logits are in memory at once as this many tokens have, which bounds the memory for a large vocabulary."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the model computes in, and engines get; the optimizer has float32 weights, and checkpoints too. `auto` is
    bfloat16 on a GPU that supports it, else float32."""
    lora: LoraSettings | None = None
    freeze_vision: bool | None = None
    """Whether the vision encoder stays as it is; by default only with `lora`."""
    critic: CriticSettings | None = None

    @model_validator(mode="after")
    def _check_compile(self) -> Self:
        if self.compile and self.gradient_checkpointing is True:
            raise ValueError("`compile` has no effect with `gradient_checkpointing: true`, but with `feed_forward`")
        return self

    @property
    def trains_vision(self) -> bool:
        """Whether the vision encoder is trained."""
        return self.lora is None if self.freeze_vision is None else not self.freeze_vision

    @property
    def rate(self) -> float:
        """The learning rate. `choose_rates` sets `lr` where it is left out."""
        if self.lr is None:
            raise ValueError("no learning rate was chosen for these settings")
        return self.lr

    @property
    def pass_tokens(self) -> int:
        """Tokens of a micro-batch; a run chooses them by its memory where they are left out."""
        return self.micro_batch_tokens or MICRO_BATCHES[0]

    @property
    def critic_rate(self) -> float:
        """The critic's learning rate."""
        given = self.critic.lr if self.critic else None
        return self.rate * (1 if self.lora else CRITIC_FACTOR) if given is None else given
