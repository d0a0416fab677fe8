"""Launches SGLang; without CUDA, it first provides what SGLang's wheel lacks there.

SGLang's own Python runs this file, so it imports nothing of mtrl: `python -P launch.py --model-path FOLDER ...` takes
the options of `sglang.launch_server`. With CUDA it only adds the options that an offline bundle needs.

Without CUDA, SGLang can compute everything in PyTorch, but its wheel is built for CUDA and does not start. Four things
are set up in each of its processes before it is imported; no file of it is changed:

1. `SGLANG_USE_CPU_ENGINE=1` and the options and variables below select the fallbacks. The caller's values win.

2. The compiled operators of torchvision's CUDA wheel do not load: two are declared without a body, so that torchvision
can be imported. Calling one of them raises PyTorch's error.

3. `sgl_kernel`, SGLang's compiled kernels, has no wheel for CPUs: a module of that name offers what is imported from it
(for speculative decoding), and declares the operators that vision models look up. Calling any of them raises.

4. SGLang's LoRA code, and where it keeps the experts of each token, pin memory, which speeds up copies to a GPU and
does not exist without one: the functions that it calls for this leave memory as it is.

SGLang does not support this combination, so only tested versions are started. `tests/sglang` compares its logprobs with
the trainer's.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

TESTED = ("0.5.23", "0.5.17")
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Otherwise the rotary table is rounded, and logprobs are off by 1e-3 instead of 1e-6.
    "SGLANG_ROPE_CACHE_FP32": "1",
    # Otherwise its processes compete for the cores.
    "OMP_NUM_THREADS": "1",
}
OPTIONS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--dtype", "float32"),
    # The default is all free memory.
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", "64"),
    # Otherwise an idle server takes a core, which the trainer needs.
    "--sleep-on-idle",
    *("--lora-backend", "torch_native"),
)
SPLIT_FLAGS = (("--tp", "--tp-size", "--tensor-parallel-size"), ("--pp", "--pp-size", "--pipeline-parallel-size"))
KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Used by Qwen3.5 alone, but SGLang imports all vision models together or none."""


def main(arguments: Sequence[str]) -> None:
    """Starts `sglang.launch_server` in this process."""
    if on_cpu(arguments):
        check(installed())
        for name, value in (ENVIRONMENT | bind_cores(arguments)).items():
            os.environ.setdefault(name, value)
        stand_in()
        arguments = [*OPTIONS, *arguments]
    else:
        arguments = [*bundled_options(), *arguments]
    sys.argv = ["sglang.launch_server", *arguments]
    # Processes that it spawns run the file of `__main__` first, which remains this one.
    runpy.run_module("sglang.launch_server", run_name="__main__")


def bundled_options() -> list[str]:
    """The options with which an offline bundle runs without the kernels that were left out of it."""
    file = Path(sys.prefix) / "launch_options.txt"
    return file.read_text().split() if file.is_file() else []


def bind_cores(arguments: Sequence[str]) -> dict[str, str]:
    """The cores of each process of a server that is split over several: SGLang would want a NUMA node for each."""
    words, size = split_words(arguments), 1
    for flags in SPLIT_FLAGS:
        given = [value for flag, value in pairwise(words) if flag in flags and value.isdecimal()]
        size *= int(given[-1]) if given else 1
    if size < 2:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // size)
    parts = [[cores[(part * each + index) % len(cores)] for index in range(each)] for part in range(size)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


def split_words(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--flag=value` as two words."""
    return [part for word in arguments for part in word.split("=", 1)]


def on_cpu(arguments: Sequence[str]) -> bool:
    """Whether SGLang runs on the CPU: as asked for, else where there is no CUDA."""
    words = split_words(arguments)
    if "--device" in words:
        return words[words.index("--device") + 1] == "cpu"
    import torch

    return not torch.cuda.is_available()


def installed() -> str:
    """The installed release of SGLang."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        sys.exit(f"launch: {sys.executable} has no SGLang: `make sglang` makes an environment that has")


def check(release: str) -> None:
    """Refuses untested versions, which may start and compute something else."""
    if release not in TESTED:
        tested = ", ".join(TESTED)
        sys.exit(f"launch: SGLang {release} was not tested without CUDA; tested: {tested} (`make sglang` installs it)")


def stand_in() -> None:
    """Declares the missing operators and kernels in this process, before SGLang is imported."""
    import torch

    for operator in ("nms", "qnms") if torch.version.cuda is None else ():  # else torchvision's own load
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for operator in OPERATORS:
        torch.library.define(f"sgl_kernel::{operator}", "(Tensor x) -> Tensor")
    sys.modules["sgl_kernel"] = kernels()
    for function in ("empty", "tensor", "zeros"):
        setattr(torch, function, _unpinned(getattr(torch, function)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    pinning = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    torch.cuda.cudart = lambda: pinning


def kernels() -> ModuleType:
    """A module with the names of `sgl_kernel`, none of which can be called."""
    module = ModuleType("sgl_kernel", "Stands in for compiled kernels: nothing in it can be called.")
    module.__spec__ = ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    for name in KERNELS:
        setattr(module, name, _absent(name))
    return module


def _unpinned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """An allocation in ordinary memory, whether or not it was to be pinned."""

    @wraps(allocate)
    def allocate_unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return allocate(*arguments, **options)

    return allocate_unpinned


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled for CUDA alone; on a CPU SGLang runs without it")

    return kernel


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    stand_in()
