"""Ranks that are killed, stuck or wrong."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import psutil
import pytest

from tests.trainer.distributed.rank_pools import make_updater, random_batch, running_ranks
from tests.trainer.policy.tiny_policies import tiny_model
from tests.trainer.processes import TIMEOUT_S, run_process
from tests.waiting import wait_until
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.train_batch import TrainSequence
from trainer.distributed.rank_commands import LeaderChannel
from trainer.distributed.rank_environment import FILE_VARIABLE
from trainer.policy.settings import PolicyError, UpdateSettings

STUCK_S = 15.0
"""More than any other stage takes on a machine that stands still for seconds."""


def process_of(channel: LeaderChannel, rank: int) -> int:
    return int(channel.names[rank].rpartition(" ")[2].rstrip(")"))


def test_rank_whose_rows_are_wrong_is_named(model: Path, tmp_path: Path) -> None:
    with running_ranks(2, tmp_path) as channel:
        _, updater = make_updater(channel, model, AlgorithmSettings(), UpdateSettings())
        batch = random_batch(tiny_model(tie_word_embeddings=True), 0)
        wrong = [replace(row, engine_logprobs=[float("nan")] * len(row.ids)) for row in batch.sequences[-3:]]
        broken = replace(batch, sequences=(*batch.sequences[:-3], *wrong))
        with pytest.raises(Exception, match=r"an engine logprob of nan"):
            updater.train_step(broken)


def test_rank_whose_memory_runs_out_in_a_step_is_named_with_the_remedy(model: Path, tmp_path: Path) -> None:
    tiny = tiny_model(tie_word_embeddings=True)
    batch = random_batch(tiny, 0)
    with running_ranks(2, tmp_path) as channel:
        _, updater = make_updater(channel, model, AlgorithmSettings(), UpdateSettings(micro_batch_tokens=2**20))
        updater.train_step(batch)
        long = [repeat_tokens(row, 100) for row in batch.sequences]
        process = psutil.Process(process_of(channel, 1))
        most = process.memory_info().vms + 2**24  # The batch fits, not what is computed from it.
        process.rlimit(psutil.RLIMIT_AS, (most, most))
        with pytest.raises(PolicyError, match=r"rank 1 .*: memory ran out ") as lost:
            updater.train_step(replace(batch, sequences=tuple(long)))
    assert "lower `update.micro_batch_tokens`" in lost.value.remedy


def repeat_tokens(row: TrainSequence, times: int) -> TrainSequence:
    """The row with its tokens repeated."""
    columns = ("ids", "mask", "engine_logprobs", "weights", "turns")
    return replace(row, **{name: list(getattr(row, name)) * times for name in columns})


def test_rank_that_is_stuck_inside_a_training_step_is_named_with_what_it_did_last(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "code"))
    script = Path(__file__).with_name("stuck_step.py")
    with run_process(tmp_path, str(script), str(model), str(STUCK_S)) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    assert (tmp_path / "code").read_text() == "1\n", "launchers that ask for rank 0's exit code get it"
    # Its silence and the stage's length are told by the same limit, whichever is seen first.
    late = r"is late, .*: "
    silent = r"has shown no sign of life for \d+ s during 'train_step', last seen in: "
    found = re.search(rf"rank 1 \([^)]*process (\d+)\) (?:{late}|{silent})pass 1 of \d", output)
    assert found and output.count("mtrl-train: ") == 1 and "remedy: " in output, output
    require_end(int(found[1]))


def require_end(pid: int) -> None:
    """A process that nobody waited for may stay as a zombie."""
    with suppress(psutil.NoSuchProcess):
        anyio.run(wait_until, lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
