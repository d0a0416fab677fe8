"""Weights are written once, to a folder that the servers read too, and are gone from it when they have been read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from anyio import to_thread
from safetensors.torch import save_file
from torch import Tensor

from trainer.engine.sglang.publish.way import Target, distinct, told, within_s
from trainer.engine.sglang.together import together


class ByDisk:
    name = "disk"

    def __init__(self, model: Path, folder: Path | None = None) -> None:
        """`model` is what the servers serve, whose configuration stays beside the weights; `folder` is one that servers
        on other machines see as well."""
        self._model, self._folder = model, folder

    async def send(self, targets: Sequence[Target], weights: Mapping[str, Tensor], version: int, flush: bool) -> None:
        folder = await to_thread.run_sync(self._written, weights, version)
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush}
        try:
            await together(partial(self._sent, target, body, within_s(weights.items())) for target in targets)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _sent(self, target: Target, body: Mapping[str, object], within: float) -> None:
        await told(target.wire, "/update_weights_from_disk", body, within=within)

    def _written(self, weights: Mapping[str, Tensor], version: int) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"weights-{version}-", dir=self._folder)).absolute()
        for file in self._model.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        save_file({name: tensor.contiguous().cpu() for name, tensor in distinct(weights)}, folder / "model.safetensors")
        return folder

    async def close(self) -> None:
        """It holds nothing."""
