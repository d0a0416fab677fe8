"""Weight sync by changed values alone: what is sent, and a weight loader for SGLang, which imports this file, too.

A server's own tensors are fused, split over processes, at times quantised or in another order, so values cannot be
changed there by their places in a checkpoint. Each process keeps what it was sent in its host's memory instead, changes
values in that, and loads whole tensors as ever. This file imports nothing of mtrl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOADER = f"{__name__}.load_changes"
"""What a server is started with as `--custom-weight-loader`, and the load format of a request."""
PLACES = "places of "
"""Before the name of a tensor: where in it, as it is flattened, the values under its name belong."""
SENDER = "sender"
"""The name of a tensor that each request has: whose tensors these are."""
KEPT = "_tensors_as_sent"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By width: types whose values are equal if their bits are."""


def load_changes(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Loads tensors that were sent whole, or as changes of what was sent before. An exception would end the server."""
    kept: dict[str, Tensor] = vars(model).setdefault(KEPT, {})
    places: dict[str, Tensor] = {}
    loaded: list[tuple[str, Tensor]] = []
    for name, tensor in named_tensors:
        if name == SENDER:
            if not tensor.equal(kept.get(SENDER, tensor)):
                kept.clear()  # Changes of another trainer's weights are an error, not a mixture.
            kept[SENDER] = tensor
            continue
        if name.startswith(PLACES):
            places[name.removeprefix(PLACES)] = tensor.cpu().long()
            continue
        if name in places:
            kept[name].view(-1)[places[name]] = tensor.to("cpu", kept[name].dtype)
        else:
            kept[name] = tensor.cpu()
        loaded.append((name, kept[name]))
    model.load_weights(loaded)


@dataclass(frozen=True, slots=True)
class ChangedBucket:
    """Tensors in the form that `load_changes` takes."""

    content: Sequence[tuple[str, Tensor]]
    is_on_gpu, load_format = False, {"load_format": LOADER}


@torch.no_grad()
def find_changes(bucket: Iterable[tuple[str, Tensor]], base: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """What a server needs that keeps the tensors of `base`: of each tensor the changes, or all if that is less."""
    needed = []
    for name, tensor in bucket:
        new = tensor.cpu().contiguous()
        places = _find_places(new, base.get(name))
        if places is None:
            needed.append((name, new.clone()))  # A view would be pickled with all that it is a view of.
        else:
            needed += [(PLACES + name, places.int()), (name, new.view(-1)[places])]
    return needed


def _find_places(new: Tensor, old: Tensor | None) -> Tensor | None:
    """Where a flattened tensor differs from another, which is rounded as it was; None where to tell that is more."""
    if old is None or old.shape != new.shape:
        return None
    bits = BITS[new.itemsize]
    differs = new.view(-1).view(bits) != old.to(new.dtype).reshape(-1).view(bits)
    is_more = int(differs.count_nonzero()) * (torch.int32.itemsize + new.itemsize) >= new.nbytes
    return None if is_more or new.numel() > torch.iinfo(torch.int32).max else differs.nonzero().view(-1)
