"""Starts SGLang as it is; where there is no CUDA, first makes up for what its wheel leaves out there.

SGLang's own Python runs this file, so it knows nothing of mtrl: `python -P launch.py --model-path FOLDER ...` takes the
options of `sglang.launch_server`. With CUDA it does nothing else.

Without CUDA, SGLang does everything in PyTorch, by fallbacks of its own; but its wheel is made for CUDA, and does not
start. Three things are set up in each of its processes before it is imported, and no file of it is changed:

1. `SGLANG_USE_CPU_ENGINE=1` and the options and variables below, which choose those fallbacks. The caller's win.
2. torchvision's wheel is one for CUDA as well, and its compiled operators do not load: two are declared, without a
   body, so that it can be imported. Whoever calls one of them gets PyTorch's error.
3. `sgl_kernel`, SGLang's compiled kernels, does not exist for CPUs as a wheel: a module of the same name offers what is
   imported from it, all of it for speculative decoding, and its operators that models which see look up are declared
   without a body. It computes nothing: each raises when it is called.

That is not a combination its makers support, so only versions that were tested are started. What it computes is held
against the trainer's own logprobs in `tests/sglang`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NoReturn

TESTED = ("0.5.23",)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Otherwise the rotary table is rounded, and logprobs are off by 1e-3 instead of 1e-6.
    "SGLANG_ROPE_CACHE_FP32": "1",
    # Its processes fight for the cores otherwise.
    "OMP_NUM_THREADS": "1",
}
OPTIONS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--dtype", "float32"),
    # Else as much as the machine has free.
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", "64"),
    # Else a server that has nothing to do takes a core, which the trainer needs.
    "--sleep-on-idle",
)
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
"""Of Qwen3.5 alone; but with it the families that see are imported together, or not at all."""


def main(arguments: Sequence[str]) -> None:
    if on_cpu(arguments):
        check(installed())
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        stand_in()
        arguments = [*OPTIONS, *arguments]
    sys.argv = ["sglang.launch_server", *arguments]
    # The processes it spawns run the file of `__main__` first, which stays this one.
    runpy.run_module("sglang.launch_server", run_name="__main__")


def on_cpu(arguments: Sequence[str]) -> bool:
    """As asked for; else where nothing better is there."""
    words = [part for word in arguments for part in word.split("=", 1)]
    if "--device" in words:
        return words[words.index("--device") + 1] == "cpu"
    import torch

    return not torch.cuda.is_available()


def installed() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        sys.exit(f"launch: {sys.executable} has no SGLang: `make sglang` makes an environment that has")


def check(found: str) -> None:
    """An untested version may start and compute something else."""
    if found not in TESTED:
        tested = ", ".join(TESTED)
        sys.exit(f"launch: SGLang {found} was not tested without CUDA; tested: {tested} (`make sglang` installs it)")


def stand_in() -> None:
    """In this process, before SGLang is imported."""
    import torch

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for operator in OPERATORS:
        torch.library.define(f"sgl_kernel::{operator}", "(Tensor x) -> Tensor")
    sys.modules["sgl_kernel"] = kernels()


def kernels() -> ModuleType:
    module = ModuleType("sgl_kernel", "Stands in for compiled kernels: nothing in it can be called.")
    module.__spec__ = ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    for name in KERNELS:
        setattr(module, name, _absent(name))
    return module


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled for CUDA alone; on a CPU SGLang runs without it")

    return kernel


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    stand_in()
