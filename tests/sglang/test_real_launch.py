"""Unmodified SGLang on a machine without CUDA: starts, ends, and computes what the trainer computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest

from tests.sglang.conftest import CONTEXT, OPTIONS, group_of
from tests.waiting import is_alive, wait_until
from trainer.engine.base import EngineError
from trainer.engine.sglang.server_process import ServerProcess, find_python

ROOT = Path(__file__).parents[2]
START_S = 600
PROMPT = list(range(40, 64))
TRAINER = """
import sys, anyio
from pathlib import Path
from tests.sglang.conftest import OPTIONS
from trainer.engine.sglang.server_process import ServerProcess

async def main():
    async with ServerProcess(Path(sys.argv[1]), OPTIONS, log=Path(sys.argv[2])):
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_idle_server_uses_no_cpu(server: ServerProcess) -> None:
    assert server.pid is not None
    await generated(server, PROMPT, 1, temperature=0.0)
    before = cpu_seconds(group_of(server.pid))
    await anyio.sleep(5)  # the time that is measured
    assert cpu_seconds(group_of(server.pid)) - before < 0.5


async def test_too_long_sequence_is_refused_and_the_server_continues(server: ServerProcess) -> None:
    async with client() as http:
        body = {"input_ids": [5] * (CONTEXT + 1), "sampling_params": {"max_new_tokens": 1}}
        assert (await http.post(f"{server.url}/generate", json=body)).status_code == 400
    assert len((await generated(server, PROMPT, 3, temperature=0.0))["output_ids"]) == 3


async def test_trainer_killed_during_server_start_leaves_no_process(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    command = [sys.executable, "-c", TRAINER, str(model), str(log)]
    trainer = await anyio.open_process(command, cwd=ROOT, stdin=None, stdout=None, stderr=None)
    try:
        await wait_until(lambda: len(started_by(trainer.pid)) >= 4, within_s=START_S)
        processes = started_by(trainer.pid)
    finally:
        trainer.kill()
        await trainer.wait()
    await wait_until(lambda: not any(is_alive(pid) for pid in processes), within_s=30)


async def test_unreadable_model_is_reported_with_sglangs_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none"}', encoding="utf-8")
    with anyio.fail_after(START_S), pytest.raises(EngineError, match=r"model.type") as told:
        async with ServerProcess(tmp_path, OPTIONS, log=tmp_path / "sglang.log"):
            pass
    assert "did not start" in str(told.value) and str(tmp_path / "sglang.log") in str(told.value)


def test_installed_releases_are_the_tested_ones() -> None:
    words = [str(find_python()), "-m", "pip", "freeze", "--all", "--disable-pip-version-check"]
    frozen = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    lock = (ROOT / ".ci/sglang-cpu.txt").read_text(encoding="utf-8").splitlines()
    found = {line.split("+")[0].lower() for line in frozen.splitlines() if not line.startswith("pip==")}
    assert found == {line.lower() for line in lock if not line.startswith("#")}


async def generated(server: ServerProcess, ids: list[int], tokens: int, *, temperature: float) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    async with client() as http:
        answer = await http.post(f"{server.url}/generate", json=body)
    assert answer.is_success, answer.text
    told: dict[str, Any] = answer.json()
    return told


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(timeout=300, trust_env=False)


def cpu_seconds(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def started_by(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
