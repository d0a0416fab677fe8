"""Features of an SGLang server, probed once: everything that differs between releases is handled here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.engine.base import EngineError
from trainer.engine.sglang.http_client import RequestRefused, ServerUnavailable, SGLangClient
from trainer.engine.sglang.server_process import VISION_CACHE_VARIABLE, ServerProcess, server_environment
from trainer.engine.sglang.weight_sync.load_changes import LOADER

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
"""The first is what an offline bundle for torch 2.11 has."""
BEGIN_UPDATE, END_UPDATE = "/begin_weight_update", "/end_weight_update"
"""The newest release accepts weights only between these two calls."""
LOAD_ADAPTERS, UNLOAD_ADAPTER = "/load_lora_adapter_from_tensors", "/unload_lora_adapter"
WITHOUT_DRAFT = ("", "NGRAM", "UNO")
"""Speculative decoding by other means than a model."""
REQUANTIZES = "flash_rl"
"""The `--load-format` of a server that quantises new weights as it did the first."""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
NEARLY_UNIFORM = 100.0
"""A temperature at which the likeliest of all ids is hardly ever sampled."""
PROBE_IDS = (11, 12, 13, 14)
"""A prompt that is continued at two temperatures."""
PROBE_TEMPERATURE = 2.0
MAX_STARTS = 3
"""How often a server of ours is started while it is probed."""


@dataclass(frozen=True, slots=True)
class ServerFeatures:
    """What a server can do, and how it was started."""

    release: str
    context: int
    """The longest sequence."""
    dtype: str
    ranks: int
    """Processes that hold a part of the weights each."""
    has_update_calls: bool
    """Weights are accepted only between `BEGIN_UPDATE` and `END_UPDATE`."""
    seeded: bool
    """A request's seed determines what is sampled."""
    has_tokenizer: bool
    """Without a tokenizer it supports neither stop strings nor images."""
    supports_images: bool
    temperature_logprobs: bool
    """Logprobs are those at the sampling temperature."""
    version_spans: bool
    """It reports which weights sampled which ids of a turn."""
    lora_rank: int = 0
    """The largest rank of LoRA adapters that it takes; 0 if it takes none."""
    lora_modules: frozenset[str] = frozenset()
    """The layers that adapters may have, or `all`."""
    loads_changes: bool = False
    """It was started with our loader of changed values."""
    tells_experts: bool = False
    """It returns the experts that tokens were sent to."""
    vision_cache_off: bool = False
    """It was started without the cache of vision encoder outputs."""
    speculation: str = ""
    """The algorithm by which it decodes speculatively, if it does."""
    quantization: str = ""
    """How its weights are quantised, if whole weights cannot be published into them."""

    @property
    def has_draft(self) -> bool:
        """It has a second model, which proposes ids."""
        return self.speculation not in WITHOUT_DRAFT

    @property
    def name(self) -> str:
        """SGLang with its release."""
        return f"sglang {self.release}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the operator."""
        notes = []
        if self.supports_images and not self.vision_cache_off:
            notes.append(
                "keeps vision encoder outputs across weight updates, unless it was started with"
                f" {VISION_CACHE_VARIABLE}=0: start it so if the vision encoder is trained (`update.freeze_vision`)"
            )
        if not self.seeded:
            notes.append("samples without seeds: runs are not reproducible to the bit")
        if parse_release(self.release) > NEWEST:
            notes.append(f"{self.release} is newer than any tested release ({format_release(NEWEST)})")
        return tuple(notes)


async def probe_with_restarts(client: SGLangClient, process: ServerProcess | None = None) -> ServerFeatures:
    """Probes a server, and restarts a process of ours that is lost meanwhile."""
    for start in range(MAX_STARTS):
        try:
            return replace(
                await probe_server(client),
                vision_cache_off=process is not None and server_environment()[VISION_CACHE_VARIABLE] == "0",
            )
        except ServerUnavailable:
            if process is None or start == MAX_STARTS - 1:
                raise
            await process.restart()
    raise AssertionError("unreachable")


async def probe_server(client: SGLangClient) -> ServerFeatures:
    """Probes a server; raises EngineError with the remedy if it cannot be used."""
    await client.post("/continue_generation", {})  # The trainer that paused it may be dead.
    info = await read_server_info(client)
    speculation = str(info.get("speculative_algorithm") or "")
    if speculation and await _is_always_greedy(client):
        problem = f"with --speculative-algorithm {speculation} takes the likeliest id at any temperature"
        raise EngineError(f"SGLang at {client.url} {problem}, as without CUDA: leave it out")
    model = await client.get("/model_info")
    samples = [await _sample(client, temperature) for temperature in (1.0, PROBE_TEMPERATURE)]
    has_tokenizer = not info.get("skip_tokenizer_init")
    return ServerFeatures(
        release=str(info["version"]),
        context=int(info.get("max_req_input_len") or info.get("context_length") or 0),
        dtype=str(info.get("dtype", "auto")),
        ranks=int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1),
        has_update_calls=BEGIN_UPDATE in (await client.get("/openapi.json"))["paths"],
        seeded=bool(info.get("enable_deterministic_inference")) and not speculation,
        has_tokenizer=has_tokenizer,
        supports_images=has_tokenizer and bool(model.get("has_image_understanding")),
        temperature_logprobs=_follow_temperature([_top_two_gap(sample) for sample in samples]),
        version_spans=all(sample.get("weight_versions") for sample in samples),
        lora_rank=int(info.get("max_lora_rank") or 0) * bool(info.get("enable_lora")),
        lora_modules=frozenset(map(str, info.get("lora_target_modules") or ())),
        loads_changes=LOADER in (info.get("custom_weight_loader") or ()),
        tells_experts=bool(info.get("enable_return_routed_experts")),
        speculation=speculation,
        quantization="" if info.get("load_format") == REQUANTIZES else str(info.get("quantization") or ""),
    )


def _find_inexact(info: Mapping[str, Any]) -> Iterator[str]:
    """What in a server's options keeps it from sampling the policy that the trainer publishes."""
    if int(info.get("dp_size") or 1) > 1:
        remedy = "start a server for each replica, and name all of them"
        yield f"uses data parallelism, whose replicas take no weights: {remedy}"
    if info.get("enable_return_routed_experts"):
        untold = {"pp_size": int(info.get("pp_size") or 1) > 1}
        untold |= {name: bool(info.get(name)) for name in ("enable_hierarchical_cache", "speculative_algorithm")}
        for name in (name for name, is_set in untold.items() if is_set):
            yield f"tells wrong experts with {name}: start it without that, or without --enable-return-routed-experts"
    half = info.get("disaggregation_mode") or "null"
    if half != "null":
        yield f"{describe_half(half)} (without --disaggregation-mode)"
    if any(info.get(name) is not None and float(info[name]) < 1 for name in THRESHOLDS):
        flag = "--speculative-accept-threshold-single or -acc"
        yield f"accepts ids that the policy would not have sampled: leave {flag} at 1"


def describe_half(role: str) -> str:
    """Why a server that does only `prefill`, or only `decode`, cannot be used. Pausing to publish leaves a prompt that
    it has partly read as it is (SGLang 0.5.17 to 0.5.23), and its end is then read by the new weights."""
    return f"only does {role}, and mixes weights in turns under way when others are published: use servers that do both"


async def read_server_info(client: SGLangClient) -> dict[str, Any]:
    """What a server tells of itself, without disturbing it; raises EngineError if its release or options are unfit."""
    try:
        info = await client.get("/server_info")
    except RequestRefused as error:
        remedy = "give the address of a server, or of a router that lists its servers at `/workers`"
        raise EngineError(f"no SGLang server answers at {client.url} ({error}): {remedy}") from error
    if not isinstance(info, dict):
        raise EngineError(f"no SGLang server answers at {client.url}: give the address that `/server_info` is under")
    release = str(info.get("version", ""))
    if parse_release(release) < OLDEST:
        tested = f"{format_release(OLDEST)} to {format_release(NEWEST)}"
        problem = f"SGLang {release or 'of an unknown release'} at {client.url} is too old"
        raise EngineError(f"{problem}: use one of {tested}, as `make sglang` does")
    for problem in _find_inexact(info):
        raise EngineError(f"SGLang at {client.url} {problem}")
    return info


async def _sample(client: SGLangClient, temperature: float, count: int = 1) -> dict[str, Any]:
    """The `meta_info` of so many sampled ids."""
    body = {
        "input_ids": PROBE_IDS,
        "sampling_params": {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    meta: dict[str, Any] = (await client.post("/generate", body))["meta_info"]
    return meta


async def _is_always_greedy(client: SGLangClient) -> bool:
    """Whether ids after the first, which SGLang verifies instead of sampling them, are the likeliest ones."""
    meta = await _sample(client, NEARLY_UNIFORM, 9)
    pairs = zip(meta["output_token_logprobs"][1:], meta["output_top_logprobs"][1:], strict=True)
    return all(pair[1] == top[0][1] for pair, top in pairs)


def _follow_temperature(gaps: Sequence[float]) -> bool:
    """Whether logprobs are scaled by the temperature: at 2, two ids are half as far gaps as at 1."""
    return abs(gaps[0] - PROBE_TEMPERATURE * gaps[1]) <= abs(gaps[0] - gaps[1])


def _top_two_gap(meta: dict[str, Any]) -> float:
    first, second = meta["output_top_logprobs"][0][:2]
    return float(first[0] - second[0])


def parse_release(release: str) -> tuple[int, ...]:
    """A release as numbers that can be compared; suffixes are ignored."""
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def format_release(release: tuple[int, ...]) -> str:
    """A release as text."""
    return ".".join(map(str, release))
