"""What a server would do otherwise, or end over, is refused before it is asked, with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.types import Image
from trainer.engine.base import Capabilities, EngineError, Sampling
from trainer.engine.sglang.probe import NEWEST, Facts, told
from trainer.engine.sglang.replica import Replica


def check(
    ids: Sequence[int], sampling: Sampling, images: Sequence[Image], able: Capabilities, facts: Sequence[Facts]
) -> None:
    for problem in (*_of_ids(ids, images, able), *_of_sampling(sampling, facts)):
        raise EngineError(problem)


def labelled(replicas: Sequence[Replica]) -> None:
    """Where turns go on under new weights, each id's must be told; by a version for the whole turn they would be
    counted as newer than they are."""
    for replica in replicas:
        if not replica.facts.spans:
            why = "does not tell which weights wrote which part of a turn, and turns go on under new ones"
            remedy = f"use {told(NEWEST)}, or `mode: synchronous` or `one_step_off`"
            raise EngineError(f"SGLang {replica.facts.release} at {replica.url} {why}: {remedy}")


def _of_ids(ids: Sequence[int], images: Sequence[Image], able: Capabilities) -> Iterator[str]:
    if not ids:
        yield "there are no ids to continue"
    if len(ids) >= able.context:
        yield f"{len(ids)} ids leave no room in the {able.context} that the server takes"
    if images and not able.images:
        yield "the model that SGLang serves sees no images, or has no tokenizer there; use one that does"


def _of_sampling(sampling: Sampling, facts: Sequence[Facts]) -> Iterator[str]:
    if sampling.stop and not all(one.tokenizer for one in facts):
        yield "stop strings need the server's tokenizer; start it without --skip-tokenizer-init, or stop at ids"
    if sampling.min_p and any(one.seeded for one in facts):
        yield "SGLang's deterministic sampling knows no min_p; use top_p"
    if sampling.temperature not in (0, 1) and not all(one.tempered for one in facts):
        remedy = "sample at temperature 1, or unset SGLANG_RETURN_ORIGINAL_LOGPROB there"
        yield f"the server tells logprobs of temperature 1, whatever it samples with; {remedy}"
