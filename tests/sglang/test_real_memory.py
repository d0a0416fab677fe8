"""A real server that gets no more memory ends, is started once more, and at the second time it is said what to do."""

from __future__ import annotations

import resource
from pathlib import Path

import anyio
import psutil
import pytest
from transformers import PreTrainedModel

from tests.sglang.conftest import OPTIONS
from tests.sglang.policy import AGREE, EOS, finds, moved, off
from tests.sglang.test_real_faults import scheduler_of
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.own import Own
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.server import Server

PROMPTS = tuple(tuple(40 + (place * 7 + row) % 400 for place in range(450)) for row in range(16))
"""Reading all of them takes megabytes at once."""
SAID = ("ran out of memory again", "can't allocate memory: you tried to allocate", "--max-total-tokens")


async def test_one_that_runs_out_of_memory_is_started_once_more_and_then_not_again(
    model: Path, policy: PreTrainedModel, tmp_path: Path
) -> None:
    server, ended = Server(model, OPTIONS, log=tmp_path / "sglang.log"), dict[int, Written]()

    async def write(row: int) -> None:
        ended[row] = await engine.generate(PROMPTS[row], Sampling(max_tokens=20, barred=(EOS,)), key=f"{row}/t/0")

    async def all_written(rows: int) -> None:
        async with anyio.create_task_group() as tasks:
            for row in range(rows):
                tasks.start_soon(write, row)

    with anyio.fail_after(300):
        async with SGLangEngine([server], ByTensors(), own=Own(finds(policy))) as engine:
            moved(policy)
            await engine.publish(policy.state_dict(), 1)
            starved(server)
            await all_written(len(PROMPTS) // 2)
            assert engine.counted["servers_lost"] == 1 and len(ended) == len(PROMPTS) // 2
            assert {one.version for one in ended.values()} == {1}
            assert max(off(policy, PROMPTS[row], one) for row, one in ended.items()) <= AGREE
            starved(server)
            with pytest.raises(ExceptionGroup) as raised:
                await all_written(len(PROMPTS))
    told = {str(error) for error in raised.value.exceptions}
    assert all(isinstance(error, EngineError) for error in raised.value.exceptions)
    assert all(all(part in one for part in SAID) for one in told), told


def starved(server: Server) -> None:
    """From now on the process that computes is refused more, as on a machine that has no more."""
    scheduler = psutil.Process(scheduler_of(server))
    scheduler.rlimit(resource.RLIMIT_AS, (scheduler.memory_info().vms, resource.RLIM_INFINITY))
