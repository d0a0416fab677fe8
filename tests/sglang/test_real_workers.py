"""Rollout workers of a job send their requests to a real server themselves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from mtrl_plugins.workers import line_channel
from tests.sglang.policy import AGREE
from tests.sglang.test_real_modes import CALCULATOR, TOOLS
from tests.trainer.train.jobs import small_job
from trainer.engine.sglang.server_process import ServerProcess
from trainer.train.start import train

STEPS = 2


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_workers_of_a_job_ask_the_server_themselves(
    mode: str, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, parse = list[dict[str, Any]](), line_channel.parse_message

    def note(line: bytes) -> dict[str, Any]:
        received.append(parse(line))
        return received[-1]

    monkeypatch.setattr(line_channel, "parse_message", note)
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
        assert 0 < max(step["mismatch/max"] for step in steps) <= 10 * AGREE
    asked, answers = ([item for item in received if item.get("t") == kind] for kind in ("generate", "sent"))
    assert asked and all("direct" in message for message in asked)
    assert answers and all(message["status"] == 200 for message in answers)
    assert 0 < sum(step["tokens/sampled"] for step in steps) <= sum(message["ids"] for message in answers)
