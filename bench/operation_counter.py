"""Counts operations while it is entered, those of a backward pass included; views are none, as they move nothing.

Imports only PyTorch: TRL's update runs it in an environment of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "all": "eager operations",
    "casts": "of them casts",
    "copies": "of them copies",
    "reads": "reads by Python, for which a GPU is waited for",
}
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal", "tolist")
COPIES = ("clone", "copy_", "_to_copy", "cat", "index", "index_select")
NOTHING = ("detach", "empty", "empty_like", "empty_strided")


class OperationCounter(TorchDispatchMode):
    """A mode that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        to_list, thread = torch.Tensor.tolist, threading.get_ident()

        def count(tensor: torch.Tensor) -> Any:
            self.counts["reads"] += threading.get_ident() == thread  # Others plan in the host's memory.
            return to_list(tensor)

        torch.Tensor.tolist = count  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        del torch.Tensor.tolist  # It is inherited.
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in NOTHING:
            dtype = kwargs.get("dtype")
            is_cast = name == "_to_copy" and dtype is not None and dtype != args[0].dtype
            is_cast |= name == "copy_" and isinstance(args[1], torch.Tensor) and args[0].dtype != args[1].dtype
            indexes = args[1] if name in ("index", "index_put_") else ()
            is_masked = any(each is not None and each.dtype == torch.bool for each in indexes)  # It is searched first.
            self.counts["all"] += 1
            self.counts["casts"] += is_cast
            self.counts["copies"] += name in COPIES and not is_cast
            self.counts["reads"] += name in READS or is_masked
        return func(*args, **kwargs)


def count_update(updater: Any, batch: Any) -> Counter[str]:
    """The operations of an update by mtrl from its first pass on: before that, its rows are in the host's memory."""
    counter = OperationCounter()
    with ExitStack() as stack:

        def start(passes: float, *_: object) -> None:
            if not passes:
                stack.enter_context(counter)

        updater.on_pass = start
        updater.train_step(batch)
    return counter.counts
