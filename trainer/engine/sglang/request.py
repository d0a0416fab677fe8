"""Builds SGLang generate requests and parses the answers, in token ids only; re-encodes images as PNG for the server.

Banned ids are taken back and sampled again, so that logprobs stay those of the unrestricted policy. SGLang itself would
change the logits and report logprobs of the changed ones.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import anyio
import torch
from anyio import to_thread

from gateway.media import MediaError
from gateway.media.image import PILImage, encode_png
from gateway.types import Image
from trainer.engine.base import EngineError, FinishReason, Generation, OnIds, Sampling
from trainer.ledger import Experts, VersionRuns, encode_version_runs
from trainer.template.render_cache import RenderCache
from trainer.vision.image_processor import VisionError, decode_image

PNG_CACHE_BYTES = 2**28
"""Size of the cache of PNG files: an image is sent again with every later turn."""
DecodeImage = Callable[[Image], PILImage]


class PngEncoder:
    """Encodes images as PNG with exactly the pixels that the trainer's image processor uses; each content once."""

    def __init__(self, decode: DecodeImage = decode_image) -> None:
        self._decode = decode
        self._cache: RenderCache[str, bytes] = RenderCache(PNG_CACHE_BYTES)
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        """By content digest: siblings ask for the same image at the same time."""

    async def encode(self, images: Sequence[Image]) -> tuple[Image, ...]:
        """Encodes images as PNG."""
        return tuple([await self._encode_image(image) for image in images])

    async def _encode_image(self, image: Image) -> Image:
        digest = image.digest
        async with self._locks.setdefault(digest, anyio.Lock()):
            return Image(await to_thread.run_sync(self._cache.get, digest, partial(self._to_png, image)))

    def _to_png(self, image: Image) -> bytes:
        try:
            decoded = self._decode(image)
            # An image that was changed has no format any more.
            return image.data if decoded.format == "PNG" else encode_png(decoded).data
        except (MediaError, VisionError) as error:
            raise EngineError(f"SGLang cannot be sent an image: {error}") from error


BAN_BIAS = -1e9
"""Added to a logit, it leaves no probability, and JSON can represent it."""
FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


def generate_body(
    ids: Sequence[int], sampling: Sampling, rid: str, cache: str, images: Sequence[Image], adapter: str = ""
) -> dict[str, Any]:
    """The body of a generate request. Prompt logprobs are never requested, as they disable the prefix cache; `cache`
    names the cache to use, `adapter` the LoRA adapters."""
    body: dict[str, Any] = {
        "input_ids": list(ids),
        "sampling_params": _sampling_params(sampling),
        "return_logprob": True,
        "rid": rid,
        "extra_key": cache,
    }
    if sampling.experts_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": sampling.experts_from}
    return body | image_fields(images) | adapter_fields(adapter)


def adapter_fields(adapter: str) -> dict[str, Any]:
    """The name of the LoRA adapters, if any."""
    return {"lora_path": adapter} if adapter else {}


def image_fields(images: Sequence[Image]) -> dict[str, Any]:
    """The images of a request as data URIs."""
    urls = [f"data:{image.mime};base64,{base64.b64encode(image.data).decode()}" for image in images]
    return {"image_data": urls} if urls else {}


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_ids),
        "skip_special_tokens": False,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.banned_ids:
        params["logit_bias"] = {str(token): BAN_BIAS for token in sampling.banned_ids}
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % 2**63
    return params


def find_abort(answer: Any) -> str | None:
    """Why the server gave a request up, if it did."""
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    reason = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    return str(reason.get("message")) if isinstance(reason, Mapping) and reason.get("type") == "abort" else None


def parse_generation(answer: Any, prompt_length: int, sampling: Sampling, images: bool) -> Generation:
    """Parses an answer; raises EngineError where its ids are not those that were requested."""
    try:
        meta = answer["meta_info"]
        output_ids, stop = tuple(answer["output_ids"]), FINISH_REASONS[meta["finish_reason"]["type"]]
        pairs = (meta.get("output_token_logprobs") or [])[: sampling.max_tokens]
        ids = tuple(int(pair[1]) for pair in pairs)
        prompt_tokens = int(meta["prompt_tokens"]) if "prompt_tokens" in meta else None
        (version, before), cached = _parse_versions(meta, len(ids)), int(meta.get("cached_tokens") or 0)
        experts = _parse_experts(meta, prompt_length + len(ids) - 1, sampling.experts_from)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang answered in an unknown form ({type(error).__name__}: {error})") from error
    if output_ids[len(output_ids) - len(ids) :] != ids or len(output_ids) != len(ids):
        raise EngineError(f"SGLang returned {len(output_ids)} ids and logprobs of {len(ids)} others")
    if prompt_tokens not in (None, prompt_length) and not images:
        raise EngineError(f"SGLang read {prompt_tokens} ids where it was asked to continue {prompt_length}")
    logprobs = tuple(float(pair[0]) for pair in pairs)
    return Generation(ids, logprobs, stop, version, cached, before, prompt_tokens, experts)


def _parse_experts(meta: Mapping[str, Any], end: int, start: int | None) -> Experts | None:
    """The experts of the tokens from `start` to `end`, which is not one of them. Raises ValueError or KeyError."""
    if start is None:
        return None
    data = bytearray(base64.b64decode(meta["routed_experts"], validate=True))
    numbers = torch.frombuffer(data, dtype=torch.int32).to(torch.int16)
    if end <= start or len(numbers) % (end - start):
        raise ValueError(f"{len(numbers)} experts for {end - start} tokens")
    return array("h", numbers.numpy().tobytes())


class StreamedAnswer:
    """Joins the events of a streamed request: each has all ids so far, or, as servers can be set, the new ones only."""

    def __init__(self, on_ids: OnIds) -> None:
        self._on_ids = on_ids
        self._last: Mapping[str, Any] = {}
        self.ids: list[int] = []
        """What was given to the caller."""
        self._pairs: list[Any] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Reads an event, and gives the caller the new ids."""
        try:
            meta, ids = event["meta_info"], [int(id) for id in event["output_ids"]]
            pairs, count = list(meta.get("output_token_logprobs") or ()), int(meta.get("completion_tokens", len(ids)))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"SGLang sent an event of unknown form ({type(error).__name__}: {error})") from error
        all_ids = ids if len(ids) >= count else self.ids + ids
        self._pairs = pairs if len(pairs) >= count else self._pairs + pairs
        new = all_ids[len(self.ids) :]
        self.ids, self._last = all_ids, event
        if new:
            self._on_ids(new)

    @property
    def answer(self) -> dict[str, Any]:
        """The answer as it is without a stream."""
        meta = {**self._last.get("meta_info", {}), "output_token_logprobs": self._pairs}
        return {**self._last, "output_ids": self.ids, "meta_info": meta}


def _parse_versions(meta: Mapping[str, Any], ids: int) -> tuple[int, VersionRuns]:
    """The weight version of the last id, and runs of earlier versions; without spans, the version at the end."""
    spans = meta.get("weight_versions")
    if not spans:
        return parse_version(meta.get("weight_version")), ()
    return encode_version_runs(
        [
            parse_version(span["version"])
            for span in spans
            for _ in range(int(span["start"]), min(int(span["end"]), ids))
        ],
        parse_version(spans[-1]["version"]),
    )


def parse_version(version: object) -> int:
    """The number of a version; -1 for weights that nobody numbered."""
    return int(str(version)) if str(version).isdecimal() else -1


MAX_RESAMPLES = 256
"""A policy that samples banned ids more often than this in one turn is broken."""
GenerateFn = Callable[[Sequence[int], Sampling], Awaitable[Generation]]


async def generate_without_banned(generate: GenerateFn, ids: Sequence[int], sampling: Sampling) -> Generation:
    """Generates without banned ids. With greedy sampling there is nothing to sample again, so the server bans them."""
    if not sampling.banned_ids or not sampling.temperature:
        return await generate(ids, sampling)
    kept, logprobs, versions, first = list[int](), list[float](), list[int](), Generation((), (), "length")
    for attempt in range(MAX_RESAMPLES):
        seed = None if sampling.seed is None else sampling.seed + attempt
        stop_ids = (*sampling.stop_ids, *sampling.banned_ids)
        left = sampling.max_tokens - len(kept)
        part = await generate(
            (*ids, *kept), replace(sampling, banned_ids=(), stop_ids=stop_ids, max_tokens=left, seed=seed)
        )
        first = first if attempt else part
        is_banned = bool(part.ids) and part.ids[-1] in sampling.banned_ids
        kept += part.ids[: len(part.ids) - is_banned]
        logprobs += part.logprobs[: len(part.ids) - is_banned]
        versions += part.versions[: len(part.ids) - is_banned]
        if not is_banned:
            version, before = encode_version_runs(versions, part.version)
            return Generation(
                tuple(kept),
                tuple(logprobs),
                part.finish_reason,
                version,
                first.cached_tokens,
                before,
                first.prompt_tokens,
                part.experts,
            )
    raise EngineError(
        f"the policy sampled banned ids {MAX_RESAMPLES} times in one turn, such as {sampling.banned_ids[0]}"
    )
