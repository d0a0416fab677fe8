"""Tests of the GPU benchmark that need no GPU: its parts' processes, its table, its batch and its FLOPs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import gpu, gpu_flops
from trainer.algorithms.packing import BatchRow


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[gpu.Bench]:
    """A benchmark of parts that are small scripts."""
    with (tmp_path / "gpu.jsonl").open("w") as file:
        yield gpu.Bench(gpu.parse_arguments(["--budget", "60"]), tmp_path, file)


def script_part(monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], deadline_s: float = 30) -> list[gpu.Part]:
    """Parts that run these scripts."""
    monkeypatch.setattr(gpu.Bench, "_command", lambda self, part, url: [sys.executable, "-uc", scripts[part.run]])
    return [gpu.Part(name, name, 0, deadline_s) for name in scripts]


FIGURE = "import json; print('noise'); print(json.dumps({'figure': 'x', 'value': 1, 'unit': 's'}))\n"


async def test_a_part_that_fails_hangs_or_is_cut_off_costs_no_figure_that_was_told(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripts = {
        "good": FIGURE,
        "raises": FIGURE + "raise SystemExit('no kernel image')",
        "hangs": FIGURE + "import time; time.sleep(1000)",
        "half a line": FIGURE + "import sys; sys.stdout.write('{\"figure\": ')",
    }
    await bench.run(script_part(monkeypatch, scripts, deadline_s=5))
    lines = gpu.read_lines(tmp_path / "gpu.jsonl")
    assert [line["part"] for line in lines if "value" in line] == list(scripts)
    assert bench.failed == ["raises", "hangs"]
    failed = {line["part"]: line["failed"] for line in lines if "failed" in line}
    assert "no kernel image" in failed["raises"] and "ended after its 5 s" in failed["hangs"]


def make_row(ids: list[int], shared: int = 2) -> BatchRow:
    mask = [index >= shared for index in range(len(ids))]
    return BatchRow("row", ids, mask, [0.0] * len(ids), [1.0] * len(ids), [float(is_trained) for is_trained in mask])


def test_shared_prefixes_are_counted_once_and_logits_only_for_trained_tokens() -> None:
    rows = [make_row([7, 7, 1]), make_row([7, 7, 2, 2])]
    assert gpu_flops.count_computed(rows, max_tokens=100, share_prefixes=True) == (5, 2)
    assert gpu_flops.count_computed(rows, max_tokens=4, share_prefixes=True) == (7, 3), "not between micro-batches"
    assert gpu_flops.count_computed(rows, max_tokens=100, share_prefixes=False) == (7, 7)
