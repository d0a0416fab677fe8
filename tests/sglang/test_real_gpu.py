"""The GPU benchmark runs from end to end on a CPU, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
START_S = 900


def test_gpu_benchmark_runs_small_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = tmp_path.glob("gpu-????-??-??.json")
    told = json.loads(file.read_text())
    assert {"about", "gates", "default job", "tiny"} <= told.keys()
    assert told["gates"]["most"] <= 1e-5 and told["default job"]["steps"] == 1
    assert told["default job, taking turns"]["steps"] == 2 and "bars" not in told
    assert told["tiny, deterministic"]["rollout_tokens_per_s"] > 0
    assert ("left_out" in told) != torch.cuda.is_available(), "what only a GPU shows is said where there is none"
    tiny = told["tiny"]
    assert 0 < tiny["computed"] < 1 and tiny["update_flops"] > 0
    assert tiny["rollouts"] == 4 and tiny["rollout_tokens_per_s"] > 0 and tiny["update_tokens_per_s"] > 0
    assert tiny["cached_of_possible"] >= 0.95 and tiny["mismatch_max"] <= 2e-5
    assert all(tiny[f"publish_{way}_s"] > 0 for way in ("tensors", "disk", "group"))
    assert "| rollout, tokens/s |" in file.with_suffix(".md").read_text()
    if "trl" in tiny:
        assert tiny["trl_update_tokens_per_s"] > 0
        assert tiny["trl_grad_norm"] == pytest.approx(tiny["update_grad_norm"], rel=1e-3)
    else:
        assert tiny["trl_problem"] == "not installed here yet"
