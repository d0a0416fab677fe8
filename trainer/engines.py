"""Which engine writes is chosen once, before anything is written, and told: nothing takes another's place later."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from gateway.types import Image
from trainer.config import PlaySettings, ServingSettings
from trainer.engine.base import Capabilities, Engine, EngineError
from trainer.template import Template

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.engine.sglang.own import Own
    from trainer.engine.sglang.publish.way import Way

Told = Callable[[str], None]


class Publisher(Protocol):
    """The policy that servers are given."""

    def finds(self, ids: Sequence[int], images: Sequence[Image] = ()) -> Sequence[float]: ...

    def filed(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...


FIRST_GPU = "--base-gpu-id"
TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
PIPELINE_PARALLEL = ("--pp", "--pp-size", "--pipeline-parallel-size")
HERE = ("localhost", "127.0.0.1", "::1")


def engine_of(
    settings: PlaySettings,
    model: Path,
    template: Template,
    folder: Path,
    *,
    policy: Publisher | None = None,
    told: Told = lambda _: None,
) -> Engine:
    """On the weights in the model's folder. Servers that are started leave their logs in `folder`; `policy` is what
    publishes to them, and they are held against; `told` hears how they start."""
    chosen = settings.engine
    if chosen == "auto":
        chosen = "sglang" if for_sglang() else "torch"
    if chosen == "torch":
        return _torch(settings, model, template)
    from trainer.engine.sglang.own import Own

    own = Own(policy.finds, policy.filed, template.eyes) if policy else Own(eyes=template.eyes)
    return _sglang(chosen, settings, model, folder, own, told)


def notes(capabilities: Capabilities) -> Iterator[str]:
    """What an operator should know of the engine."""
    for note in capabilities.notes:
        yield f"note: the {capabilities.name} engine {note}"


def for_sglang() -> bool:
    """Whether CUDA and SGLang are there."""
    import torch

    if not torch.cuda.is_available():
        return False
    from trainer.engine.sglang.environment import python

    try:
        python()
    except EngineError:
        return False
    return True


def _torch(settings: PlaySettings, model: Path, template: Template) -> Engine:
    import torch

    from trainer.engine.torch import TorchEngine
    from trainer.model import load_model, settle

    settle()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(model, device=device)
    decode, eyes = template.tokens.decode, template.eyes
    return TorchEngine(loaded, decode=decode, eyes=eyes, rows=settings.admission.writing)


def _sglang(chosen: str, settings: PlaySettings, model: Path, folder: Path, own: Own, told: Told) -> Engine:
    from trainer.engine.sglang.engine import SGLangEngine
    from trainer.engine.sglang.server import Options, Server

    serving, flows = settings.serving, getattr(settings, "mode", "") == "asynchronous"
    engine = partial(SGLangEngine, own=own, in_place=serving.in_place, flows=flows)
    if serving.deterministic:
        _may_be_deterministic(chosen)
    if chosen != "sglang":
        urls = tuple(chosen.split(","))
        near = all(urlsplit(url).hostname in HERE for url in urls)
        way = _way(serving, model, near)
        return engine(urls, way)
    servers = []
    for place, gpu in enumerate(_gpus(serving)):
        words = (*serving.options, *(("--enable-deterministic-inference",) if serving.deterministic else ()), *gpu)
        options = Options(more=words, tokenizer=_sees(model))
        servers.append(Server(model, options, log=folder / f"sglang-{place}.log", told=told))
    lends, way = serving.placement == "together", _way(serving, model, True)
    return engine(servers, way, lends=lends)


def _gpus(serving: ServingSettings) -> list[tuple[str, ...]]:
    """By server, the options that say where it is: SGLang puts each on the first GPU otherwise."""
    import torch

    from trainer.engine.sglang.launch import on_cpu

    if serving.replicas == 1 or not torch.cuda.is_available() or on_cpu(serving.options):
        return [()] * serving.replicas
    each = _number(serving.options, 1, *TENSOR_PARALLEL) * _number(serving.options, 1, *PIPELINE_PARALLEL)
    base, there = _number(serving.options, 0, FIRST_GPU), torch.cuda.device_count()
    if base + each * serving.replicas > there:
        told = f"{serving.replicas} servers with {each} GPU{'s'[: each > 1]} each, where there are {there - base}"
        raise EngineError(f"`serving.replicas` asks for {told}: ask for fewer, or name servers on other machines")
    return [(FIRST_GPU, str(base + place * each)) for place in range(serving.replicas)]


def _number(options: Sequence[str], default: int, *names: str) -> int:
    """As argparse takes it: the last one counts, whether its value follows or is part of the word."""
    words = [part for word in options for part in word.split("=", 1)]
    values = [value for name, value in pairwise(words) if name in names and value.isdecimal()]
    return int(values[-1]) if values else default


def _may_be_deterministic(chosen: str) -> None:
    import torch

    if chosen != "sglang":
        told = f"cannot be asked of {chosen}, which runs: start it with --enable-deterministic-inference instead"
        raise EngineError(f"`serving.deterministic` {told}")
    if not torch.cuda.is_available():
        raise EngineError("`serving.deterministic` needs a GPU: SGLang has no such attention for CPUs; leave it out")


def _way(serving: ServingSettings, model: Path, near: bool) -> Way:
    """By tensors on one machine, and from one without a GPU; between machines by the network of the GPUs."""
    import torch

    from trainer.engine.sglang.publish.disk import ByDisk
    from trainer.engine.sglang.publish.group import ByGroup
    from trainer.engine.sglang.publish.tensors import ByTensors

    chosen = serving.publish
    if chosen == "auto":
        chosen = "tensors" if near or not torch.cuda.is_available() else "group"
    if chosen == "disk":
        return ByDisk(model, serving.folder)
    return ByGroup() if chosen == "group" else ByTensors()


def _sees(model: Path) -> bool:
    """Whether the model takes images."""
    try:
        return "vision_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
