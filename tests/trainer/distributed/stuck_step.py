"""A training step of two ranks, of which rank 1 is stopped once it waits for rank 0 within the step."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from tests.trainer.distributed.rank_pools import make_updater, random_batch
from tests.trainer.policy.tiny_policies import tiny_model
from tests.waiting import wait_until
from trainer.algorithms.settings import AlgorithmSettings
from trainer.cli.errors import report_errors
from trainer.cli.rank_command import keep_exit_code
from trainer.distributed.connect_ranks import STAGE_KEY
from trainer.distributed.lead import open_ranks
from trainer.distributed.settings import DistributedSettings
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater


async def main(model: Path, timeout_s: float) -> None:
    settings = DistributedSettings(ranks=2, timeout_s=timeout_s)
    async with open_ranks(settings, {}, model, Path("logs")) as channel:
        assert channel is not None
        accumulate = PolicyUpdater._accumulate_gradient

        def stop_rank_1_first(self: PolicyUpdater, *arguments: Any) -> float:
            # Rank 1 cannot go on before this rank gathers weights with it.
            anyio.run(wait_until, lambda: channel.ranks.side_store.get(STAGE_KEY.format(1)).startswith(b"pass 1 of"))
            os.kill(int(channel.names[1].rpartition(" ")[2].rstrip(")")), signal.SIGSTOP)
            return accumulate(self, *arguments)

        PolicyUpdater._accumulate_gradient = stop_rank_1_first  # type: ignore[method-assign]

        def step() -> None:
            _, updater = make_updater(channel, model, AlgorithmSettings(), UpdateSettings())
            updater.train_step(random_batch(tiny_model(tie_word_embeddings=True), 0))

        await anyio.to_thread.run_sync(step)


if __name__ == "__main__":
    with keep_exit_code(), report_errors():
        anyio.run(partial(main, Path(sys.argv[1]), float(sys.argv[2])))
