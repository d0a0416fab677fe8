"""Tests of the GPU benchmark that need no GPU: its parts' processes, its table, its batch and its FLOPs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import gpu


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
