"""A job with rollout workers trains on a real server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from tests.sglang.policy import AGREE
from tests.sglang.test_real_modes import CALCULATOR, TOOLS
from tests.trainer.train.jobs import small_job
from trainer.engine.sglang.server_process import ServerProcess
from trainer.train.start import train

STEPS = 2


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_workers_of_a_job_play_on_a_real_server(mode: str, server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "calculator.py").write_text(CALCULATOR)
    more = {"demo": {"kinds": ["fact"]}, "steps": STEPS, "evaluation": {"every": 0}, "sampling": {"temperature": 1.0}}
    more |= {"engine": server.url, "rollout": {"workers": 2}, "record": False}
    run = tmp_path / "run"
    with anyio.fail_after(900):
        await train(small_job(mode=mode, tools=str(tmp_path), **more), run, Console(file=io.StringIO(), width=200))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and [step["rollout/lost"] for step in steps] == [0] * STEPS
    assert max(step["agreement/max"] for step in steps) <= AGREE
    if mode == "synchronous":  # Otherwise tokens may be of earlier weights.
        # A step whose groups have equal rewards each teaches nothing, and has no mismatch.
        assert all(0 < step["mismatch/max"] <= 10 * AGREE for step in steps if step["groups/teaching"])
