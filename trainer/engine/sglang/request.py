"""What is asked of a server and what it answered, in ids: nothing here knows text."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import Image
from trainer.engine.base import EngineError, Sampling, Stop, Written
from trainer.ledger import Spells, spelled

BARRED = -1e9
"""Added to a logit, it leaves no chance, and no number that JSON cannot write."""
STOPS: Mapping[str, Stop] = {"stop": "stop", "length": "length", "abort": "abort"}


def asked(ids: Sequence[int], sampling: Sampling, rid: str, cache: str, images: Sequence[Image]) -> dict[str, Any]:
    """Logprobs of the prompt are never asked for: that would compute it anew. Caches of other names are not read."""
    body: dict[str, Any] = {
        "input_ids": list(ids),
        "sampling_params": _params(sampling),
        "return_logprob": True,
        "rid": rid,
        "extra_key": cache,
    }
    return body | pictured(images)


def pictured(images: Sequence[Image]) -> dict[str, Any]:
    told = [f"data:{image.mime};base64,{base64.b64encode(image.data).decode()}" for image in images]
    return {"image_data": told} if told else {}


def _params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_ids),
        "skip_special_tokens": False,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.barred:
        params["logit_bias"] = {str(token): BARRED for token in sampling.barred}
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % 2**63
    return params


def written(answer: Any, asked_ids: int, most: int, images: bool) -> Written:
    """Raises where the answer is of other ids than those that were asked for, which are at most so many."""
    try:
        meta = answer["meta_info"]
        told, stop = tuple(answer["output_ids"]), STOPS[meta["finish_reason"]["type"]]
        # Who writes nothing is told at times how likely the first id would have been.
        pairs = (meta.get("output_token_logprobs") or [])[: 0 if stop == "abort" and not told else most]
        ids = tuple(int(pair[1]) for pair in pairs)
        read = int(meta["prompt_tokens"]) if "prompt_tokens" in meta else None  # Not where it was aborted in the queue.
        (version, before), cached = _versions(meta, len(ids)), int(meta.get("cached_tokens") or 0)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang answered in a form that we do not know ({type(error).__name__}: {error})") from error
    if told[len(told) - len(ids) :] != ids or len(told) != len(ids):
        raise EngineError(f"SGLang wrote {len(told)} ids and gave logprobs of {len(ids)}, which are not the same")
    if read not in (None, asked_ids) and not images:
        raise EngineError(f"SGLang read {read} ids where it was asked to continue {asked_ids}")
    return Written(ids, tuple(float(pair[0]) for pair in pairs), stop, version, cached, before, read)


def _versions(meta: Mapping[str, Any], ids: int) -> tuple[int, Spells]:
    """Of the last of so many ids, and of those before; who tells no spans tells the version at the end."""
    spans = meta.get("weight_versions")
    if not spans:
        return numbered(meta.get("weight_version")), ()
    return spelled(
        [numbered(span["version"]) for span in spans for _ in range(int(span["start"]), min(int(span["end"]), ids))],
        numbered(spans[-1]["version"]),
    )


def numbered(version: object) -> int:
    """-1 of weights that nobody numbered."""
    return int(str(version)) if str(version).isdecimal() else -1
