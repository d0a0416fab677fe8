"""Counts the eager operations of an update in mtrl and in TRL: each is a launch from Python, or a kernel on a GPU.

python bench/operations.py          # half a minute; writes the end of bench/results/trainer.md, as `make bench-trainer`
Layers that differ by two tell what a layer costs; the rest is the embedding, the head, the loss and the optimizer.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from dataclasses import replace  # noqa: E402

from gpu_trl import measure_trl_update  # noqa: E402
from gpu_workload import SHAPES, build_random_model, make_batch  # noqa: E402
from operation_counter import KINDS, count_update  # noqa: E402

from trainer.algorithms.settings import AlgorithmSettings  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402
from trainer.policy.update import PolicyUpdater  # noqa: E402

LAYERS = (2, 4)
HEAD = "| an update of one micro-batch |"


def main() -> None:
    counts, file = format_counts(*count_operations()), ROOT / "bench" / "results" / "trainer.md"
    print(counts)
    file.write_text(file.read_text().partition(HEAD)[0] + counts + "\n")


def count_operations() -> tuple[dict[str, list[Mapping[str, int]]], str]:
    """The operations of a second update by trainer, for each number of layers; and TRL's version, or its problem."""
    found: dict[str, list[Mapping[str, int]]] = {"mtrl": [], "mtrl in bfloat16": []}
    about = ""
    algorithm = AlgorithmSettings.model_validate({"name": "dapo", "mismatch": {"truncate": "never"}})  # TRL's loss
    for layers in LAYERS:
        shape = replace(SHAPES["tiny"], layers=layers)
        with TemporaryDirectory() as folder:
            model, batch = build_random_model(shape, Path(folder), cuda=False), make_batch(shape)
            for name, dtype in (("mtrl in bfloat16", "bfloat16"), ("mtrl", "float32")):
                settings = UpdateSettings.model_validate({"lr": 1e-6, "micro_batch_tokens": 8192, "dtype": dtype})
                updater = PolicyUpdater(Policy.load(model, settings), algorithm, exact=False, deterministic=True)
                updater.train_step(batch)
                found[name].append(count_update(updater, batch))
            try:
                peer = measure_trl_update(model, updater.last_rows, shape.siblings, settings, 2, counts_operations=True)
            except RuntimeError as error:
                about = f"TRL was not counted: {error}"
            else:
                about = f"TRL {peer['version']}"
                found.setdefault("TRL", []).append(Counter(peer["operations"]))
    return found, about


def format_counts(found: Mapping[str, list[Mapping[str, int]]], about: str) -> str:
    """A table of what a layer and the rest take, by kind."""
    heads = [f"{name}, {part}" for name in found for part in ("a layer", "the rest")]
    lines = [f"{HEAD} " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for kind, title in KINDS.items():
        cells = []
        for few, many in found.values():
            layer = (many[kind] - few[kind]) / (LAYERS[1] - LAYERS[0])
            cells += [f"{layer:,.0f}", f"{few[kind] - LAYERS[0] * layer:,.0f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Counted {time.strftime('%Y-%m-%d')}; {about}"])


if __name__ == "__main__":
    main()
