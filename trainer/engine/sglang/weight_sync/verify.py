"""Verifies a server's weights: compares its logprobs of probe prompts with the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import torch
from torch import Tensor

from gateway.media.image import encode_png, to_pil_image
from gateway.types import Image
from trainer.engine.base import EXACT_TOLERANCE, Agreement, EngineError
from trainer.engine.sglang.http_client import SGLangClient
from trainer.engine.sglang.request import adapter_fields, image_fields
from trainer.engine.sglang.server_features import NEWEST, format_release
from trainer.engine.sglang.server_process import VISION_CACHE_VARIABLE
from trainer.engine.sglang.weight_sync.adapters import NO_ADAPTERS, AdapterPlan
from trainer.vision.image_processor import ImageProcessor

LogprobFn = Callable[[Sequence[int], Sequence[Image]], Sequence[float]]
"""The trainer's logprobs at temperature 1 of all ids but the first, given the ids and the images among them."""
CheckpointNamesFn = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Renames weights to their names in a checkpoint's files, which is what servers load."""


@dataclass(frozen=True, slots=True)
class TrainerReference:
    """The trainer's logprobs and weight names, which servers are verified with, and its adapters. Empty where nobody
    trains."""

    compute_logprobs: LogprobFn | None = None
    checkpoint_tensors: CheckpointNamesFn = dict
    image_processor: ImageProcessor | None = None
    adapters: AdapterPlan = NO_ADAPTERS


NO_REFERENCE = TrainerReference()


TOLERANCE: Mapping[str, float] = {"float32": 0.01}
"""The largest difference in nats that rounding can cause."""
TOLERANCE_ROUNDED = 0.5
"""The same for other dtypes."""
STALE_RATIO = 4.0
"""Where the trainer's logprobs moved more than this many times the server's distance from the old weights, the server
still has the old ones; less may be rounding."""


def compare_logprobs(server: Sequence[float], trainer: Sequence[float]) -> Agreement:
    """The largest and the mean difference."""
    if len(server) != len(trainer):
        raise EngineError(f"SGLang returned {len(server)} logprobs for a prompt that has {len(trainer)}")
    differences = [abs(value - other) for value, other in zip(server, trainer, strict=True)]
    # max() of numbers and NaN could be any of them.
    differences = [value if isfinite(value) else inf for value in differences]
    return Agreement(max(differences), sum(differences) / len(differences))


def check_agreement(
    url: str, server: Sequence[float], trainer: Sequence[float], before: Sequence[float] | None, dtype: str
) -> Agreement:
    """Raises EngineError if the server has other weights, or those published before."""
    now = compare_logprobs(server, trainer)
    if not now.max_difference <= TOLERANCE.get(dtype, TOLERANCE_ROUNDED):
        detail = f"its logprobs differ from the trainer's by up to {now.max_difference:.3g} nats"
        raise EngineError(f"SGLang at {url} has other weights than were published: {detail}")
    if before is not None and compare_logprobs(trainer, before).max_difference > max(
        EXACT_TOLERANCE, STALE_RATIO * compare_logprobs(server, before).max_difference
    ):
        raise EngineError(f"SGLang at {url} has the previously published weights, although it reports the new version")
    return now


PROBE_PROMPT = tuple(range(2, 34))
"""Any ids that every vocabulary has: other weights give them other logprobs."""
IDS_AFTER_IMAGE = 16
"""Ids that follow the image: their logprobs depend on what the model saw."""
IMAGE_SIDE = 64
"""Of the image, before it is resized for the model."""
SCORE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LogprobProbe:
    """A prompt whose logprobs are compared."""

    ids: tuple[int, ...]
    compared: int
    """The number of ids at the end that are compared; an image before them expands to many ids."""
    images: tuple[Image, ...] = ()

    @property
    def remedy(self) -> str:
        """A hint for the error of an image probe."""
        return (
            f"; only image logprobs differ from the trainer's: was it started with {VISION_CACHE_VARIABLE}=0?"
            * bool(self.images)
        )


def make_probes(processor: ImageProcessor | None) -> tuple[LogprobProbe, ...]:
    """A text probe, and for vision models one with an image: text alone does not reach the vision encoder."""
    if processor is None:
        return (LogprobProbe(PROBE_PROMPT, len(PROBE_PROMPT) - 1),)
    family = processor.family
    words = tuple(id for id in range(PROBE_PROMPT[0], len(PROBE_PROMPT) + 99) if id not in family.banned_ids)
    words = words[: len(PROBE_PROMPT)]
    before, behind = family.frame
    ids = (*words[:IDS_AFTER_IMAGE], *before, family.image_id, *behind, *words[IDS_AFTER_IMAGE:])
    with_image = LogprobProbe(ids, len(words) - IDS_AFTER_IMAGE, (_probe_image(processor),))
    return LogprobProbe(words, len(words) - 1), with_image


def _probe_image(processor: ImageProcessor) -> Image:
    """A noise image."""
    noise = torch.randint(
        256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return encode_png(processor.fit_image(encode_png(to_pil_image(noise))))


def trainer_logprobs(compute_logprobs: LogprobFn, probe: LogprobProbe) -> Sequence[float]:
    """The trainer's logprobs of a probe."""
    return compute_logprobs(probe.ids, probe.images)[-probe.compared :]


async def server_logprobs(client: SGLangClient, probe: LogprobProbe, adapter: str = "") -> list[float]:
    """A server's logprobs of a probe, with the LoRA adapters of that name. Rollouts never request prompt logprobs."""
    body = {
        "input_ids": probe.ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await client.post(
        "/generate", body | image_fields(probe.images) | adapter_fields(adapter), within=SCORE_TIMEOUT_S
    )
    pairs = answer["meta_info"]["input_token_logprobs"][-probe.compared :]
    if tuple(pair[1] for pair in pairs) != probe.ids[-probe.compared :]:
        where = ", beside an image, as older releases do" * bool(probe.images)
        raise EngineError(
            f"SGLang at {client.url} reads other ids than it was sent{where}: use {format_release(NEWEST)}"
        )
    return [nan if pair[0] is None else float(pair[0]) for pair in pairs]  # JSON has no NaN.
