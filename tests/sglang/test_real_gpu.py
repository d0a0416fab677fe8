"""The GPU benchmark on a CPU, in small, with real SGLang: a part that is killed costs no other part's figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import PARTS
from tests.trainer.train.jobs import SMALL, demo_model

ROOT = Path(__file__).parents[2]
ONCE = [part.name for part in PARTS if part.name not in ("update 1.5B", "TRL 0.5B")]
"""The first is 0.5B's again, in small, and the other needs TRL."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("odd", [0, 1])
def test_each_part_is_killed_in_turn_and_the_others_tell_their_figures(odd: int, tmp_path: Path) -> None:
    killed, job = ONCE[odd::2], tmp_path / "job.yaml"
    job.write_text(json.dumps({**SMALL, "tools": "demo"}))
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--small", "--engine", "sglang", "--out", str(tmp_path)]
    command += ["--job", str(job), "--policy", str(demo_model()), "--only", *ONCE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stdout is not None
            for text in bench.stdout:
                line = json.loads(text) if text.startswith("{") else {}
                if line.get("part") in killed and "process" in line:
                    os.kill(line["process"], signal.SIGKILL)
            assert bench.wait() == 1, "a run with a killed part does not pass for a whole one"
        finally:
            bench.send_signal(signal.SIGINT)  # It ends its server and its parts.
    lines = [json.loads(text) for text in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines == json.loads((tmp_path / "gpu.json").read_text())
    by_part = {name: [line for line in lines if line.get("part") == name] for name in ONCE}
    for name, own in by_part.items():
        failure = [line["failed"] for line in own if "failed" in line]
        if name in killed:
            assert failure and "ended with -9" in failure[0], own
        else:
            assert not failure and [line for line in own if "value" in line], (name, own)
    check_figures({name: own for name, own in by_part.items() if name not in killed})


def check_figures(by_part: dict[str, list[dict[str, Any]]]) -> None:
    """What each part's figures must be on any machine."""

    def values(part: str, figure: str) -> list[Any]:
        return [line["value"] for line in by_part[part] if line.get("figure") == figure and "value" in line]

    if "gates" in by_part:
        assert values("gates", "logprobs apart, most")[0] <= 1e-5
    if "rollouts" in by_part:
        assert values("rollouts", "prefix cache hits")[0] >= 0.95 and values("rollouts", "share of bare SGLang")[0] > 0
    if "publishing" in by_part:
        ways = {line["way"] for line in by_part["publishing"] if line.get("figure") == "publishing" and "value" in line}
        assert ways >= {"tensors", "disk"}
    if "update 0.5B" in by_part:
        shared, alone, *_ = values("update 0.5B", "computed")
        assert shared < alone == 1.0
    if "memory" in by_part:
        assert {line["placement"] for line in by_part["memory"] if "phase" in line} == {"together", "beside"}
        assert len(values("memory", "planned")) == len(values("memory", "measured")) == 2 * 3
    if "learning" in by_part:
        assert values("learning", "seconds")
    if "resuming" in by_part:
        assert values("resuming", "weights apart, most") and values("resuming", "weights moved, most")[0] > 0
