"""Requests to the engine and their answers as messages: ids and logprobs are packed, so that nothing is rounded."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from gateway.types import Image
from trainer.engine.base import Generation, Sampling
from trainer.storage.rollout_line import BlobStore, unpack_array

_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
_TUPLES = {"stop_ids": int, "stop": str, "banned_ids": int}
"""The fields of `Sampling` that are tuples, with the type of their items."""
_get_sampling = attrgetter(*_SAMPLING_FIELDS)


def pack_plain(values: Sequence[float], kind: str) -> str:
    """Like `pack_array`, but never compressed: it is read once, by a process that waits for it."""
    return f"plain:{b64encode(struct.pack(f'<{len(values)}{kind}', *values)).decode()}"


def sampling_to_plain(sampling: Sampling) -> list[Any]:
    """Sampling parameters as JSON."""
    return list(_get_sampling(sampling))


def sampling_from_plain(plain: Sequence[Any]) -> Sampling:
    """The parameters that `sampling_to_plain` encoded. Raises ValueError or TypeError for anything else."""
    values = dict(zip(_SAMPLING_FIELDS, plain, strict=True))
    for name, kind in _TUPLES.items():
        values[name] = tuple(kind(item) for item in values[name])
    for name in ("temperature", "top_p", "min_p"):
        values[name] = float(values[name])
    for name in ("max_tokens", "top_k"):
        values[name] = int(values[name])
    if values["seed"] is not None:
        values["seed"] = int(values["seed"])
    return Sampling(**values)


def request_to_plain(
    ids: Sequence[int], sampling: Sampling, images: Sequence[Image], blobs: BlobStore
) -> dict[str, Any]:
    """A request to the engine as JSON."""
    request: dict[str, Any] = {"ids": pack_plain(ids, "i"), "sampling": sampling_to_plain(sampling)}
    if images:
        request["images"] = [[blobs.put(image.data), image.mime] for image in images]
    return request


def request_from_plain(
    plain: Mapping[str, Any], blobs: BlobStore, vocabulary: int
) -> tuple[tuple[int, ...], Sampling, tuple[Image, ...]]:
    """The ids, sampling and images of a request. Raises ValueError, TypeError or KeyError for anything else."""
    if not plain["ids"].startswith("plain:"):
        raise ValueError("a request has compressed ids")
    ids = unpack_array(plain["ids"], "i")
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(
            f"a request has ids from {min(ids)} to {max(ids)}; the model has those from 0 to {vocabulary - 1}"
        )
    images = tuple(Image(blobs.get(digest), str(mime)) for digest, mime in plain.get("images", ()))
    return ids, sampling_from_plain(plain["sampling"]), images


def generation_to_plain(generation: Generation) -> dict[str, Any]:
    """A generation as JSON."""
    return {
        "ids": pack_plain(generation.ids, "i"),
        "logprobs": pack_plain(generation.logprobs, "d"),
        "finish": generation.finish_reason,
        "version": generation.version,
        "cached": generation.cached_tokens,
        "earlier": generation.earlier_versions,
        "prompt": generation.prompt_tokens,
    }


def generation_from_plain(plain: Mapping[str, Any]) -> Generation:
    """The generation that `generation_to_plain` encoded."""
    return Generation(
        unpack_array(plain["ids"], "i"),
        unpack_array(plain["logprobs"], "d"),
        plain["finish"],
        plain["version"],
        plain["cached"],
        tuple((version, count) for version, count in plain["earlier"]),
        plain["prompt"],
    )
