"""One turn's generation: checks the request, then sends as many requests to a server as the turn needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.types import Image
from trainer.engine.base import Capabilities, EngineError, Generation, OnIds, Sampling
from trainer.engine.sglang.replica import Replica
from trainer.engine.sglang.request import generate_without_banned
from trainer.engine.sglang.server_features import NEWEST, ServerFeatures, format_release
from trainer.engine.sglang.weight_sync.published import PublishedWeights


def check_request(
    ids: Sequence[int],
    sampling: Sampling,
    images: Sequence[Image],
    capabilities: Capabilities,
    features: Sequence[ServerFeatures],
) -> None:
    """Raises EngineError with the remedy for what the servers would do differently, or crash on."""
    for problem in (*_id_problems(ids, images, capabilities), *_sampling_problems(sampling, features)):
        raise EngineError(problem)


def require_version_spans(replicas: Sequence[Replica]) -> None:
    """Refuses servers that do not report which weights sampled which token, where turns continue under new weights.
    With one version for the whole turn, old tokens would count as newer than they are."""
    for replica in replicas:
        if not replica.features.version_spans:
            why = "does not report which weights sampled which part of a turn, and turns continue under new weights"
            remedy = f"use {format_release(NEWEST)}, or `mode: synchronous` or `one_step_off`"
            raise EngineError(f"SGLang {replica.features.release} at {replica.url} {why}: {remedy}")


def _id_problems(ids: Sequence[int], images: Sequence[Image], capabilities: Capabilities) -> Iterator[str]:
    if not ids:
        yield "there are no ids to continue"
    if len(ids) >= capabilities.context_length:
        yield f"{len(ids)} ids leave no room in the context of {capabilities.context_length} that the server has"
    if images and not capabilities.supports_images:
        yield "the model that SGLang serves takes no images, or was started without a tokenizer; use one that has both"


def _sampling_problems(sampling: Sampling, features: Sequence[ServerFeatures]) -> Iterator[str]:
    if sampling.stop and not all(item.has_tokenizer for item in features):
        yield "stop strings need the server's tokenizer; start it without --skip-tokenizer-init, or stop at ids"
    if sampling.temperature not in (0, 1) and not all(item.temperature_logprobs for item in features):
        remedy = "sample at temperature 1, or unset SGLANG_RETURN_ORIGINAL_LOGPROB there"
        yield f"the server returns logprobs at temperature 1, whatever it samples with; {remedy}"


@dataclass(eq=False)
class PendingTurn:
    """A turn under way."""

    key: str
    published: PublishedWeights
    on_ids: OnIds | None = None
    banned_ids: tuple[int, ...] = ()
    is_seen: bool = False
    """The caller was given some ids, so that the turn cannot start again."""

    def report_ids(self, ids: Sequence[int]) -> None:
        """Gives the caller ids; one that is banned is sampled again."""
        kept = [id for id in ids if id not in self.banned_ids]
        if kept and self.on_ids:
            self.is_seen = True
            self.on_ids(kept)

    async def generate(
        self, replica: Replica, ids: Sequence[int], sampling: Sampling, images: Sequence[Image], prefix_group: str
    ) -> Generation:
        """Generates the turn on a replica. `prefix_group` names the group whose shared prompt may not be cached yet; it
        is then prefilled once, before the siblings are routed."""
        prefill = None
        if prefix_group:
            prefill = await replica.prefill(ids, self.key, prefix_group, self.published.name, images)

        async def generate_part(ids: Sequence[int], sampling: Sampling) -> Generation:
            await self.published.wait_until_current()
            report = self.report_ids if self.on_ids else None
            return await replica.generate(ids, sampling, self.key, self.published.name, images, report)

        generation = await generate_without_banned(generate_part, ids, sampling)
        return replace(generation, cached_tokens=prefill.cached_tokens) if prefill else generation
