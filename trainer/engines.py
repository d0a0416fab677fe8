"""Chooses and makes the engine: embedded torch, or SGLang servers. The choice is made once, before rollouts begin."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.plural import format_count
from trainer.engine.base import Capabilities, Engine, EngineError
from trainer.rollout.settings import BaseRolloutSettings, ServingSettings
from trainer.template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.engine.sglang.weight_sync.base import WeightSync
    from trainer.engine.sglang.weight_sync.verify import TrainerReference
    from trainer.policy.policy import Policy

Log = Callable[[str], None]


FIRST_GPU_FLAG = "--base-gpu-id"
TENSOR_PARALLEL_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")
PIPELINE_PARALLEL_FLAGS = ("--pp", "--pp-size", "--pipeline-parallel-size")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def make_engine(
    settings: BaseRolloutSettings,
    model: Path,
    template: Template,
    folder: Path,
    *,
    policy: Policy | None = None,
    log: Log = lambda _: None,
) -> Engine:
    """Makes the engine for the model's folder. Servers that it starts log to `folder`; `policy` publishes weights to
    them and verifies them; `log` gets progress messages."""
    chosen = settings.engine
    if chosen == "auto":
        chosen = "sglang" if can_use_sglang() else "torch"
    if chosen == "torch":
        return _make_torch_engine(settings, model, template, policy)
    from trainer.engine.sglang.weight_sync.adapters import plan_adapters
    from trainer.engine.sglang.weight_sync.verify import TrainerReference

    processor = template.image_processor
    reference = TrainerReference(image_processor=processor)
    if policy:
        lends_memory = settings.serving.placement == "together"
        adapters = plan_adapters(settings.serving.lora, policy.adapter_shape, model, lends_memory=lends_memory)
        reference = TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors, processor, adapters)
    return _make_sglang_engine(settings, model, folder, reference, log)


def engine_notes(capabilities: Capabilities) -> Iterator[str]:
    """What an operator should know about the engine."""
    for note in capabilities.notes:
        yield f"note: the {capabilities.name} engine {note}"


def has_gpu() -> bool:
    """Whether CUDA is available."""
    import torch

    return torch.cuda.is_available()


def can_use_sglang() -> bool:
    """Whether CUDA and SGLang are available."""
    import torch

    if not torch.cuda.is_available():
        return False
    from trainer.engine.sglang.server_process import find_python

    try:
        find_python()
    except EngineError:
        return False
    return True


def _make_torch_engine(settings: BaseRolloutSettings, model: Path, template: Template, policy: Policy | None) -> Engine:
    """An engine in this process, which may use the tensors of the policy."""
    import torch

    from trainer.engine.torch.choose_holding import choose_holding, is_half, largest_matrix
    from trainer.engine.torch.threads import MIN_PARAMETERS
    from trainer.engine.torch.torch_engine import TorchEngine
    from trainer.engine.torch.weights import Holding
    from trainer.model import configure_torch, load_model

    configure_torch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = is_half(settings.engine_precision, device, getattr(getattr(settings, "update", None), "dtype", "auto"))
    shared = None if half else _find_shared_model(settings, policy)
    loaded = load_model(model, torch.bfloat16 if half else torch.float32, device) if shared is None else shared
    parameters, matrix = loaded.num_parameters(), largest_matrix(loaded)
    holding: Holding = "bfloat16"
    if not half:
        can_share = shared is not None
        holding = choose_holding(settings.engine_precision, parameters, matrix, device=device, can_share=can_share)
    deterministic = settings.deterministic
    if deterministic is None:
        deterministic = device == "cpu" and parameters < MIN_PARAMETERS
    return TorchEngine(
        loaded,
        decode=template.tokenizer.decode,
        image_processor=template.image_processor,
        max_sequences=settings.concurrency.running_requests,
        holding=holding,
        deterministic=deterministic,
        longest=settings.limits.rollout_tokens,
    )


def _find_shared_model(settings: BaseRolloutSettings, policy: Policy | None) -> PreTrainedModel | None:
    """The trainer's model, if an engine can hold its tensors: it is large, and no update runs beside rollouts."""
    import torch

    from trainer.engine.torch.choose_holding import MIN_SHARED
    from trainer.engine.torch.dense_model import unsupported_reason

    model = policy.whole_model if policy and getattr(settings, "mode", "") == "synchronous" else None
    if model is None or model.num_parameters() < MIN_SHARED or model.dtype != torch.float32:
        return None
    return None if unsupported_reason(model) else model


def _make_sglang_engine(
    settings: BaseRolloutSettings, model: Path, folder: Path, reference: TrainerReference, log: Log
) -> Engine:
    from trainer.engine.sglang.check_parallel import check_tensor_parallel
    from trainer.engine.sglang.launch import on_cpu
    from trainer.engine.sglang.server_process import ServerOptions, ServerProcess
    from trainer.engine.sglang.sglang_engine import SGLangEngine
    from trainer.engine.sglang.weight_sync.adapters import LORA_FLAG

    serving, is_async = settings.serving, getattr(settings, "mode", "") == "asynchronous"
    engine = partial(SGLangEngine, reference=reference, in_place=serving.in_place, publishes_mid_turn=is_async)
    if urls := settings.engine_urls:
        is_local = all(urlsplit(url).hostname in LOCAL_HOSTS for url in urls)
        return engine(urls, _make_weight_sync(serving, model, is_local))
    check_tensor_parallel(model, read_flag(serving.options, 1, *TENSOR_PARALLEL_FLAGS))
    servers = []
    flags = serving.options
    flags += () if LORA_FLAG in flags else reference.adapters.server_flags
    flags += ("--trust-remote-code",) if settings.trust_remote_code else ()
    flags += ("--enable-fp32-lm-head",) if serving.fp32_head else ()
    flags += ("--enable-deterministic-inference",) if settings.deterministic and not on_cpu(flags) else ()
    for index, gpu in enumerate(_gpu_flags(serving)):
        options = ServerOptions(extra=(*flags, *gpu), tokenizer=has_vision(model))
        servers.append(ServerProcess(model, options, log=folder / f"sglang-{index}.log", notify=log))
    weight_sync = _make_weight_sync(serving, model, True)
    return engine(servers, weight_sync, releases_memory=serving.placement == "together")


def leave_gpus(serving: ServingSettings, trainer_gpus: int) -> ServingSettings:
    """Settings whose servers, if there are several and no GPU is named, come after the GPUs of the trainer's ranks."""
    import torch

    from trainer.engine.sglang.launch import on_cpu

    if serving.replicas == 1 or not torch.cuda.is_available() or on_cpu(serving.options):
        return serving
    base = read_flag(serving.options, trainer_gpus, FIRST_GPU_FLAG)
    return serving.model_copy(update={"options": (*serving.options, FIRST_GPU_FLAG, str(base))})


def _gpu_flags(serving: ServingSettings) -> list[tuple[str, ...]]:
    """The GPU flags of each server, as SGLang would place every server on the first GPU."""
    import torch

    from trainer.engine.sglang.launch import on_cpu

    if serving.replicas == 1 or not torch.cuda.is_available() or on_cpu(serving.options):
        return [()] * serving.replicas
    gpus_each = read_flag(serving.options, 1, *TENSOR_PARALLEL_FLAGS) * read_flag(
        serving.options, 1, *PIPELINE_PARALLEL_FLAGS
    )
    base, count = read_flag(serving.options, 0, FIRST_GPU_FLAG), torch.cuda.device_count()
    if base + gpus_each * serving.replicas > count:
        gpus = f"{format_count(gpus_each, 'GPU')} each, but {max(0, count - base)} are available"
        gpus += f" from number {base} on" if base else ""
        remedy = "ask for fewer, or name servers on other machines"
        raise EngineError(f"`serving.replicas` asks for {serving.replicas} servers with {gpus}: {remedy}")
    return [(FIRST_GPU_FLAG, str(base + index * gpus_each)) for index in range(serving.replicas)]


def read_flag(options: Sequence[str], default: int, *names: str) -> int:
    """The value of a flag as argparse reads it: the last one counts, as `--flag value` or `--flag=value`."""
    parts = [part for word in options for part in word.split("=", 1)]
    values = [value for name, value in pairwise(parts) if name in names and value.isdecimal()]
    return int(values[-1]) if values else default


def _make_weight_sync(serving: ServingSettings, model: Path, is_local: bool) -> WeightSync:
    """Weight sync by tensors on one machine or without a GPU; by process group between machines."""
    import torch

    from trainer.engine.sglang.weight_sync.disk import DiskSync
    from trainer.engine.sglang.weight_sync.process_group import ProcessGroupSync
    from trainer.engine.sglang.weight_sync.tensors import TensorSync

    chosen = serving.weight_sync
    if chosen == "auto":
        chosen = "tensors" if is_local or not torch.cuda.is_available() else "group"
    if chosen.startswith("disk"):
        folder = chosen.removeprefix("disk").removeprefix(":")
        return DiskSync(model, Path(folder) if folder else None)
    return ProcessGroupSync() if chosen == "group" else TensorSync()


def has_vision(model: Path) -> bool:
    """Whether the model takes images."""
    try:
        return "vision_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
