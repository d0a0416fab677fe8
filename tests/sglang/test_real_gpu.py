"""The GPU benchmark runs on a CPU, in small; a part that is killed costs no other part's figures."""

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

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
ONCE = [part.name for part in PARTS if part.name != "update 1.5B"]  # the same part as 0.5B's, in small


@pytest.mark.parametrize("odd", [0, 1])
def test_each_part_is_killed_in_turn_and_the_others_tell_their_figures(odd: int, tmp_path: Path) -> None:
    killed = ONCE[odd::2]
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--small", "--out", str(tmp_path), "--only", *ONCE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as bench:
        assert bench.stdout is not None
        for text in bench.stdout:
            line = json.loads(text) if text.startswith("{") else {}
            if line.get("part") in killed and "process" in line:
                os.kill(line["process"], signal.SIGKILL)
        assert bench.wait(LIMIT_S) == 1, "a run with a killed part does not pass for a whole one"
    lines = [json.loads(text) for text in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines == json.loads((tmp_path / "gpu.json").read_text())
    for name in ONCE:
        told = [line for line in lines if line.get("part") == name]
        failure = [line["failed"] for line in told if "failed" in line]
        if name in killed:
            assert failure and "ended with -9" in failure[0], told
        else:
            missing = [line for line in told if "skipped" in line]
            assert (not failure and [line for line in told if "value" in line]) or missing, (name, told)
    check_figures({name: [line for line in lines if line.get("part") == name] for name in ONCE if name not in killed})


def check_figures(told: dict[str, list[dict[str, Any]]]) -> None:
    """What each part's figures must be on any machine."""

    def values(part: str, figure: str) -> list[Any]:
        return [line["value"] for line in told[part] if line.get("figure") == figure and "value" in line]

    if "gates" in told:
        assert values("gates", "logprobs apart, most")[0] <= 1e-5
    if "rollouts" in told:
        assert values("rollouts", "prefix cache hits")[0] >= 0.95 and values("rollouts", "share of bare SGLang")[0] > 0
    if "publishing" in told:
        ways = {line["way"] for line in told["publishing"] if line.get("figure") == "publishing" and "value" in line}
        assert ways >= {"tensors", "disk"}
    if "update 0.5B" in told:
        shared, alone, *_ = values("update 0.5B", "computed")
        assert shared < alone == 1.0
    if "resuming" in told:
        assert values("resuming", "equal to the bit") == [True]
    if "learning" in told:
        assert values("learning", "seconds")
