"""Ranks that are killed, stuck or wrong, and checkpoints that are resumed with another number of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.distributed.rank_pools import make_updater, random_batch, running_ranks
from tests.trainer.policy.tiny_policies import tiny_model
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.errors import RankError
from trainer.distributed.rank_commands import LeaderChannel
from trainer.policy.errors import PolicyError
from trainer.policy.policy import Policy
from trainer.policy.settings import CriticSettings, LoraSettings, UpdateSettings

GAE = AlgorithmSettings.model_validate({"name": "reinforce_pp", "credit": {"kind": "gae"}})
FULL, LORA = UpdateSettings(critic=CriticSettings()), UpdateSettings(lora=LoraSettings(rank=4))
STUCK_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(tie_word_embeddings=True).save_pretrained(folder)
    return folder


def train(
    channel: LeaderChannel | None, model: Path, update: UpdateSettings, checkpoint: Path | None, seeds: range
) -> tuple[Policy, dict[str, float]]:
    algorithm = GAE if update.critic else AlgorithmSettings()
    policy, updater = make_updater(channel, model, algorithm, update)
    if checkpoint:
        policy.resume(checkpoint)
    metrics: dict[str, float] = {}
    for seed in seeds:
        metrics = updater.train_step(random_batch(tiny_model(tie_word_embeddings=True), seed))
    return policy, metrics


def process_of(channel: LeaderChannel, rank: int) -> int:
    return int(channel.names[rank].rpartition(" ")[2].rstrip(")"))


def test_checkpoints_resume_with_any_number_of_ranks_and_errors_name_the_rank(model: Path, tmp_path: Path) -> None:
    with running_ranks(2, tmp_path) as channel:
        for name, update in {"full": FULL, "lora": LORA}.items():
            _, expected = train(None, model, update, None, range(4))
            alone, _ = train(None, model, update, None, range(3))
            alone.save(tmp_path / f"{name}-1")
            sharded, _ = train(channel, model, update, None, range(3))
            sharded.save(tmp_path / f"{name}-2")
            for ranks, saved_by in ((channel, 1), (None, 2), (channel, 2)):
                policy, metrics = train(ranks, model, update, tmp_path / f"{name}-{saved_by}", range(3, 4))
                assert policy.steps == 4
                assert metrics["update/grad_norm"] == pytest.approx(expected["update/grad_norm"], rel=1e-6)
                assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        with pytest.raises(PolicyError, match="muon"):
            make_updater(channel, model, AlgorithmSettings(), UpdateSettings(optimizer="muon"))
        assert channel.is_broken


def test_rank_whose_rows_are_wrong_is_named(model: Path, tmp_path: Path) -> None:
    with running_ranks(2, tmp_path) as channel:
        _, updater = make_updater(channel, model, AlgorithmSettings(), UpdateSettings())
        batch = random_batch(tiny_model(tie_word_embeddings=True), 0)
        wrong = [replace(row, engine_logprobs=[float("nan")] * len(row.ids)) for row in batch.sequences[-3:]]
        broken = replace(batch, sequences=(*batch.sequences[:-3], *wrong))
        with pytest.raises(Exception, match=r"an engine logprob of nan"):
            updater.train_step(broken)


def test_killed_rank_ends_the_step_by_its_name(model: Path, tmp_path: Path) -> None:
    with running_ranks(2, tmp_path) as channel:
        _, updater = make_updater(channel, model, AlgorithmSettings(), UpdateSettings())
        os.kill(process_of(channel, 1), signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 .* was killed by signal 9 \(SIGKILL\) during 'train_step'"):
            updater.train_step(random_batch(tiny_model(tie_word_embeddings=True), 0))


def test_stuck_rank_ends_the_step_with_what_it_did_last(model: Path, tmp_path: Path) -> None:
    with running_ranks(2, tmp_path, timeout_s=STUCK_S) as channel:
        os.kill(process_of(channel, 1), signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank 1 .* is late, and was last seen in: "):
            make_updater(channel, model, AlgorithmSettings(), UpdateSettings())
