"""A real server that runs out of memory is restarted once; the second time there is a remedy."""

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
from trainer.engine.base import EngineError, Generation, Sampling
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference

PROMPTS = tuple(tuple(40 + (place * 7 + row) % 400 for place in range(450)) for row in range(16))
"""Reading all of them takes megabytes at once."""
SAID = ("ran out of memory again", "can't allocate memory: you tried to allocate", "--max-total-tokens")


async def test_server_out_of_memory_is_restarted_once(model: Path, policy: PreTrainedModel, tmp_path: Path) -> None:
    server, ended = ServerProcess(model, OPTIONS, log=tmp_path / "sglang.log"), dict[int, Generation]()

    async def write(row: int) -> None:
        ended[row] = await engine.generate(PROMPTS[row], Sampling(max_tokens=20, banned_ids=(EOS,)), key=f"{row}/t/0")

    async def all_written(rows: int) -> None:
        async with anyio.create_task_group() as tasks:
            for row in range(rows):
                tasks.start_soon(write, row)

    with anyio.fail_after(900):
        async with SGLangEngine([server], TensorSync(), reference=TrainerReference(finds(policy))) as engine:
            moved(policy)
            await engine.publish(policy.state_dict(), 1)
            starved(server)
            await all_written(len(PROMPTS) // 2)
            assert engine.counters["servers_lost"] == 1 and len(ended) == len(PROMPTS) // 2
            assert {one.version for one in ended.values()} == {1}
            assert max(off(policy, PROMPTS[row], one) for row, one in ended.items()) <= AGREE
            starved(server)
            with pytest.raises(ExceptionGroup) as raised:
                await all_written(len(PROMPTS))
    told = {str(error) for error in raised.value.exceptions}
    assert all(isinstance(error, EngineError) for error in raised.value.exceptions)
    assert all(all(part in one for part in SAID) for one in told), told


def starved(server: ServerProcess) -> None:
    """From now on the process that computes is refused more, as on a machine that has no more."""
    scheduler = psutil.Process(scheduler_of(server))
    scheduler.rlimit(resource.RLIMIT_AS, (scheduler.memory_info().vms, resource.RLIM_INFINITY))
