"""Speeds of devices from their data sheets."""

from __future__ import annotations

from mtrl_plugins.plan.speeds import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    HALF_BYTES,
    Device,
    EngineSpeed,
    ModelSize,
    TrainerSpeed,
)
from trainer.policy.memory_plan import FLOAT_BYTES
from trainer.train.settings import TrainSettings

LAUNCH_S = 0.002
"""Seconds of a decode step besides reading and arithmetic. An assumption."""
EXCHANGE_S = 20e-6
"""Seconds for each layer in which the devices of a server exchange their sums. An assumption."""
OPERATIONS = 2
"""Operations for each parameter and token in a forward pass; a backward pass takes twice as many."""
STATE_BYTES = 28
"""Bytes that an optimizer step reads and writes for each trained parameter: weight, gradient and two moments."""


def update_passes(settings: TrainSettings) -> float:
    """Forward passes that an update is worth for each token."""
    update = settings.update
    passes = float(update.epochs * (4 if update.gradient_checkpointing else 3))
    if update.epochs * update.minibatches > 1:
        passes += 1  # The logprobs of the policy before the step.
    return passes + (1 if settings.algorithm.kl.coefficient else 0)


def optimizer_steps(settings: TrainSettings) -> int:
    """Optimizer steps of an update."""
    return settings.update.epochs * settings.update.minibatches


def engine_speed(model: ModelSize, device: Device, tp: int, max_running: int) -> EngineSpeed:
    """A server of `tp` devices."""
    bandwidth, flops = tp * BANDWIDTH_EFFICIENCY * device.bandwidth, tp * COMPUTE_EFFICIENCY * device.flops
    exchange_s = model.layers * EXCHANGE_S if tp > 1 else 0.0
    token_s = OPERATIONS * model.numbers / flops
    return EngineSpeed(
        LAUNCH_S + exchange_s + model.server_bytes / bandwidth,
        context_s=model.kv_bytes / bandwidth,
        floor_s=token_s,
        prefill_s=token_s,
        max_running=max(1, max_running),
    )


def trainer_speed(
    model: ModelSize, device: Device, ranks: int, devices: int, settings: TrainSettings, step_tokens: float
) -> TrainerSpeed:
    """All ranks of a trainer. Weights are gathered for every pass over a micro-batch; where that takes longer than the
    arithmetic, it is what counts."""
    passes, steps = update_passes(settings), optimizer_steps(settings)
    arithmetic_s = passes * OPERATIONS * model.numbers / (COMPUTE_EFFICIENCY * device.flops * ranks)
    link = device.link_to(ranks)
    gathered_s = HALF_BYTES * model.numbers * (ranks - 1) / ranks / link
    micro_batches = max(1.0, step_tokens / max(1, settings.update.micro_batch_tokens) / ranks)
    per_token_s = passes * gathered_s * micro_batches / max(1.0, step_tokens)
    optimizer_s = STATE_BYTES * model.trained / ranks / (BANDWIDTH_EFFICIENCY * device.bandwidth)
    reduced_s = FLOAT_BYTES * model.trained * (ranks - 1) / ranks / link
    publish_s = model.server_bytes / device.link_to(devices)
    return TrainerSpeed(max(arithmetic_s, per_token_s), steps * (optimizer_s + reduced_s), publish_s)
