"""Checkpoints that ranks write together: resumed with any number of them, and bad ones are named."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from tests.trainer.distributed.rank_pools import make_updater, random_batch, running_ranks, save_wider_model
from tests.trainer.policy.tiny_policies import tiny_model
from tests.waiting import PATIENCE_S
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.errors import LostRankError
from trainer.distributed.lead import LeadPolicy, wait_for_shards
from trainer.distributed.rank_commands import LeaderChannel
from trainer.distributed.settings import DistributedSettings
from trainer.distributed.watchdog import Watchdog
from trainer.distributed.write_shards import WRITTEN_KEY, find_unwritten
from trainer.policy.policy import Policy
from trainer.policy.settings import CriticSettings, LoraSettings, PolicyError, UpdateSettings
from trainer.policy.shards import INDEX_FILE, SHARDS_FOLDER

GAE = AlgorithmSettings.model_validate({"name": "reinforce_pp", "credit": {"kind": "gae"}})
UPDATES = {"full": UpdateSettings(critic=CriticSettings()), "lora": UpdateSettings(lora=LoraSettings(rank=4))}
STEPS = 3
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Saved:
    """Checkpoints after three steps, by kind and number of ranks, and the metrics of the fourth."""

    model: Path
    folder: Path
    expected: dict[str, dict[str, float]]

    def checkpoint(self, kind: str, ranks: int) -> Path:
        return self.folder / f"{kind}-{ranks}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Checkpoints of one process, and of three ranks."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(tie_word_embeddings=True).save_pretrained(folder / "model")
    expected = {}
    with running_ranks(3, folder) as channel:
        for kind in UPDATES:
            alone, _ = train(None, folder / "model", kind, None, range(STEPS))
            assert alone.save(folder / f"{kind}-1") is None
            save(train(channel, folder / "model", kind, None, range(STEPS))[0], folder / f"{kind}-3")
            _, expected[kind] = train(None, folder / "model", kind, None, range(STEPS + 1))
            saved = Saved(folder / "model", folder, expected)
            require_same_step(channel, saved, kind, 3)
    return saved


def save(policy: Policy, folder: Path) -> None:
    finish = policy.save(folder)
    assert finish is not None
    digests = finish()
    assert digests.keys() == {f"{SHARDS_FOLDER}/{file.name}" for file in (folder / SHARDS_FOLDER).iterdir()}


def train(
    channel: LeaderChannel | None, model: Path, kind: str, checkpoint: Path | None, seeds: range
) -> tuple[Policy, dict[str, float]]:
    update = UPDATES[kind]
    policy, updater = make_updater(channel, model, GAE if update.critic else AlgorithmSettings(), update)
    if checkpoint:
        policy.resume(checkpoint)
    metrics: dict[str, float] = {}
    for seed in seeds:
        metrics = updater.train_step(random_batch(tiny_model(tie_word_embeddings=True), seed))
    return policy, metrics


def require_same_step(channel: LeaderChannel | None, saved: Saved, kind: str, ranks: int) -> Policy:
    """The fourth step is that of an undisturbed run."""
    checkpoint, expected = saved.checkpoint(kind, ranks), saved.expected[kind]
    policy, metrics = train(channel, saved.model, kind, checkpoint, range(STEPS, STEPS + 1))
    assert policy.steps == STEPS + 1
    for name in ("loss", "update/grad_norm", "update/lr", *(["critic/loss"] if kind == "full" else [])):
        assert metrics[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=TOLERANCE), name
    return policy


@pytest.mark.parametrize("size", [1, 2, 4])
def test_checkpoint_of_three_ranks_and_of_one_resume_with_any_number(saved: Saved, size: int, tmp_path: Path) -> None:
    if size == 1:
        for kind in UPDATES:
            require_same_step(None, saved, kind, 3)
        return
    with running_ranks(size, tmp_path, shard=2) as channel:  # Two of four share a copy of the weights.
        for kind in UPDATES:
            require_same_step(channel, saved, kind, 1)
            trained = require_same_step(channel, saved, kind, 3)
            save(trained, tmp_path / kind)
            again, _ = train(None, saved.model, kind, tmp_path / kind, range(0))
            differences = [float((again.weights[name] - value).abs().max()) for name, value in trained.weights.items()]
            assert max(differences) == 0
        if size == 2:
            refuse_bad_checkpoints(channel, saved, tmp_path)


def refuse_bad_checkpoints(channel: LeaderChannel, saved: Saved, folder: Path) -> None:
    """Rank 0 names what is wrong, and the ranks stay together; so they do where one cannot write."""
    other = LeadPolicy.lead(channel, save_wider_model(folder / "other"), UPDATES["full"])
    with pytest.raises(PolicyError, match=r"full-3/shards cannot be loaded .*another model: critic: layers.0.mlp"):
        other.resume(saved.checkpoint("full", 3))
    (folder / "blocked" / "__1_0.distcp").mkdir(parents=True)
    with channel.command("save", {"folder": str(folder / "blocked")}):
        written = other.save_shards(folder / "blocked")
    with pytest.raises(IsADirectoryError):
        written.result(60)
    assert find_unwritten(channel.ranks.store, folder / "blocked", channel.names) == [channel.names[1]]
    save(other, folder / "afterwards")
    assert find_unwritten(channel.ranks.store, folder / "afterwards" / SHARDS_FOLDER, channel.names) == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda shards: (shards / "__1_0.distcp").unlink(), "__1_0.distcp"),
        (lambda shards: (shards / "__2_0.distcp").write_bytes((shards / "__2_0.distcp").read_bytes()[:-4000]), "Error"),
        (lambda shards: (shards / INDEX_FILE).write_bytes((shards / INDEX_FILE).read_bytes()[:-10]), "pickle data"),
        (lambda shards: (shards / INDEX_FILE).write_bytes(pickle.dumps(print)), "it names builtins.print"),
        (lambda shards: (shards / INDEX_FILE).write_bytes(pickle.dumps({})), "no index of a checkpoint"),
    ],
)
def test_damaged_shards_are_refused_and_nothing_in_them_is_executed(
    saved: Saved, tmp_path: Path, spoil, problem: str
) -> None:  # type: ignore[no-untyped-def]
    folder = shutil.copytree(saved.checkpoint("lora", 3), tmp_path / "copy")
    spoil(folder / SHARDS_FOLDER)
    with pytest.raises(PolicyError, match=rf"copy/shards cannot be loaded \((?s:.*){problem}"):
        train(None, saved.model, "lora", folder, range(0))


def test_ranks_that_lose_each_other_while_writing_are_not_told_as_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.distributed.lead.DISK_TIMEOUT_S", PATIENCE_S)
    broken: Future[dict[str, str]] = Future()
    broken.set_exception(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    store, names = HashStore(), {rank: f"rank {rank} (m)" for rank in range(4)}
    channel = make_channel(store, names)
    for rank, folder in enumerate((tmp_path, tmp_path / "before", tmp_path)):
        store.set(WRITTEN_KEY.format(rank), str(folder))
    with pytest.raises(LostRankError, match=r"lost each other .*, without the part of rank 1 \(m\), rank 3 \(m\)\n"):
        wait_for_shards(broken, tmp_path, channel)


def make_channel(store: HashStore, names: dict[int, str]) -> LeaderChannel:
    ranks: Any = SimpleNamespace(
        rank=1, size=len(names), settings=DistributedSettings(), side_store=store, watchdog=Watchdog(store, 0)
    )
    return LeaderChannel(ranks, dict, names)


def test_rank_that_is_killed_while_it_writes_a_checkpoint_is_named_at_once(saved: Saved, tmp_path: Path) -> None:
    with running_ranks(2, tmp_path) as channel:
        policy, _ = train(channel, saved.model, "full", None, range(1))
        write_settings = policy.write_model_settings

        def add_pipe(folder: Path) -> None:  # Rank 1 waits for a reader of its file.
            write_settings(folder)
            os.mkfifo(folder / SHARDS_FOLDER / "__1_0.distcp")

        with patch.object(policy, "write_model_settings", add_pipe):
            finish = policy.save(tmp_path / "checkpoint")
        assert finish is not None
        os.kill(int(channel.names[1].rpartition(" ")[2].rstrip(")")), signal.SIGKILL)
        with pytest.raises(LostRankError, match=r"rank 1 \(.*\)( was killed by signal 9 .* during 'checkpoint'|\n)"):
            finish()
        channel.is_broken = True
