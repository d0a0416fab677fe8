"""Weight sync by disk: writes safetensors files to a folder that the servers read, and deletes it afterwards.

A server that is split over GPUs answers once its first rank has loaded them, so that its folder stays until the next
publish: one that is gone too early would be looked for on the hub, and end the server. A folder whose process was
killed is deleted by the next publish to the same place, see `storage/temporary_folder.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from anyio import to_thread
from safetensors.torch import save_file
from torch import Tensor

from trainer.engine.base import Buckets, EngineError
from trainer.engine.sglang.http_client import run_all
from trainer.engine.sglang.weight_sync.base import (
    SyncTarget,
    load_timeout_s,
    post_checked,
    selector,
    split_into_buckets,
)
from trainer.storage.temporary_folder import TemporaryFolder

BUCKET = 2**30
"""Bytes of weights in a file."""


class DiskSync:
    """Sends weights through a folder."""

    name = "disk"

    def __init__(self, model: Path, folder: Path | None = None) -> None:
        """`model` is the folder that the servers serve, whose configuration is copied beside the weights; `folder` is
        one that servers on other machines can read."""
        self._model, self._folder = model, folder
        self._kept: TemporaryFolder | None = None
        """The folder of the last publish, if ranks of a server may still read it."""

    async def send(
        self, targets: Sequence[SyncTarget], weights: Mapping[str, Tensor], version: int, flush: bool, *_: object
    ) -> int:
        if selector(targets):
            raise EngineError(
                "SGLang would load the folder of weights into its draft model, too: use `serving.weight_sync: tensors`"
            )
        await self.close()
        with ExitStack() as stack:
            folder = stack.enter_context(await to_thread.run_sync(TemporaryFolder, self._folder, f"weights-{version}-"))
            body = {"model_path": str(folder.path), "weight_version": str(version), "flush_cache": flush}
            path, parts = "/update_weights_from_disk", split_into_buckets(weights, BUCKET, targets)
            size = await to_thread.run_sync(self._write_folder, folder.path, parts)
            await run_all(
                partial(post_checked, target.client, path, body, within=load_timeout_s(size)) for target in targets
            )
            if any(target.features.ranks > 1 for target in targets):
                stack.pop_all()
                self._kept = folder
        return size

    def _write_folder(self, folder: Path, parts: Buckets) -> int:
        """Writes the weights into the folder; returns how many bytes they have."""
        for file in self._model.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        size, files = 0, dict[str, str]()
        for index in range(len(parts)):
            part = {name: tensor.contiguous().cpu() for name, tensor in parts[index]}
            file_name = f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
            save_file(part, folder / file_name)
            files |= dict.fromkeys(part, file_name)
            size += sum(tensor.nbytes for tensor in part.values())
        content = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")
        return size

    async def close(self) -> None:
        """Deletes what was kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            await to_thread.run_sync(kept.remove)
