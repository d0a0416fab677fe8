"""What a server is, asked once: all that differs between releases of SGLang is known here, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.engine.base import EngineError
from trainer.engine.sglang.environment import SIGHT, environment
from trainer.engine.sglang.server import Server
from trainer.engine.sglang.wire import Gone, Refused, Wire

OLDEST, NEWEST = (0, 5, 9), (0, 5, 23)
NEEDED = frozenset(
    {
        "/generate",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
    }
)
BEGIN, END = "/begin_weight_update", "/end_weight_update"
"""Of releases that take weights between the two only."""
TEMPERED = (11, 12, 13, 14)
"""Ids of which two continuations at two temperatures are asked for."""
WARM = 2.0
STARTS = 3
"""Of a server of ours, before what it is is known."""


@dataclass(frozen=True, slots=True)
class Facts:
    release: str
    context: int
    """The longest sequence that it takes."""
    dtype: str
    ranks: int
    """Processes that each hold a part of the weights."""
    begins: bool
    """Weights are taken between `BEGIN` and `END`."""
    seeded: bool
    """A request's seed decides what is sampled."""
    tokenizer: bool
    """Without one it knows neither stop strings nor images."""
    images: bool
    tempered: bool
    """Logprobs are those of the temperature that is sampled with."""
    spans: bool
    """Of each id of a turn it tells which weights wrote it."""
    forgets: bool = False
    """It was started so that it keeps nothing of what it saw of pictures."""

    @property
    def name(self) -> str:
        return f"sglang {self.release}"

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.images and not self.forgets:
            notes.append(
                "keeps what was seen of a picture for later weights, unless it was started with"
                f" {SIGHT}=0: start it so where the eyes are trained (`update.vision`)"
            )
        if not self.seeded:
            notes.append("samples without seeds: no run of it is repeated to the bit")
        if number(self.release) > NEWEST:
            notes.append(f"{self.release} is newer than any that was tested ({told(NEWEST)})")
        return tuple(notes)


async def probed(wire: Wire, ours: Server | None = None) -> Facts:
    """One of ours that is lost while it is asked is started again."""
    for start in range(STARTS):
        try:
            return replace(await probe(wire), forgets=ours is not None and environment()[SIGHT] == "0")
        except Gone:
            if ours is None or start == STARTS - 1:
                raise
            await ours.restart()
    raise AssertionError("unreachable")


async def probe(wire: Wire) -> Facts:
    """What cannot be worked with is told here, with what can."""
    await wire.post("/continue_generation", {})  # Whoever paused it may be dead.
    info = await _info(wire)
    release = str(info.get("version", ""))
    if number(release) < OLDEST:
        raise EngineError(_unfit(wire, release, "is too old"))
    paths = await _paths(wire)
    if missing := sorted(NEEDED - paths):
        raise EngineError(_unfit(wire, release, f"has no {missing[0]}"))
    if int(info.get("dp_size") or 1) > 1:
        remedy = "start a server for each replica, and name all of them"
        raise EngineError(f"SGLang at {wire.url} has replicas of its own, which take no weights: {remedy}")
    model = await wire.get("/model_info")
    written = [await _written(wire, temperature) for temperature in (1.0, WARM)]
    tokenizer = not info.get("skip_tokenizer_init")
    return Facts(
        release=release,
        context=int(info.get("max_req_input_len") or info.get("context_length") or 0),
        dtype=str(info.get("dtype", "auto")),
        ranks=int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1),
        begins={BEGIN, END} <= paths,
        seeded=bool(info.get("enable_deterministic_inference")),
        tokenizer=tokenizer,
        images=tokenizer and bool(model.get("has_image_understanding")),
        tempered=_tempered([_apart(one) for one in written]),
        spans=all(one.get("weight_versions") for one in written),
    )


async def _info(wire: Wire) -> dict[str, Any]:
    try:
        told = await wire.get("/server_info")
    except Refused as error:
        remedy = "give the address of a server, or of a router that tells its servers at `/workers`"
        raise EngineError(f"no SGLang server answers at {wire.url} ({error}): {remedy}") from error
    if not isinstance(told, dict):
        raise EngineError(f"no SGLang server answers at {wire.url}: give the address that `/server_info` is under")
    return told


async def _paths(wire: Wire) -> frozenset[str]:
    return frozenset((await wire.get("/openapi.json"))["paths"])


async def _written(wire: Wire, temperature: float) -> dict[str, Any]:
    """What is told of one id."""
    asked = {
        "input_ids": TEMPERED,
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    meta: dict[str, Any] = (await wire.post("/generate", asked))["meta_info"]
    return meta


def _tempered(apart: Sequence[float]) -> bool:
    """Between two ids, logprobs at a temperature of 2 are half as far apart as at 1."""
    return abs(apart[0] - WARM * apart[1]) <= abs(apart[0] - apart[1])


def _apart(meta: dict[str, Any]) -> float:
    first, second = meta["output_top_logprobs"][0][:2]
    return float(first[0] - second[0])


def number(release: str) -> tuple[int, ...]:
    """To be compared; of what comes behind the numbers nothing is known."""
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def _unfit(wire: Wire, release: str, why: str) -> str:
    tested = f"{told(OLDEST)} to {told(NEWEST)}"
    return (
        f"SGLang {release or 'of an unknown release'} at {wire.url} {why}: use one of {tested}, as `make sglang` does"
    )


def told(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
