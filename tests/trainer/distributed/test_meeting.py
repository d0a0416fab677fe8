"""How batches travel to ranks, how ranks find each other, and what they must have in common; without processes."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from gateway.errors import ConfigError
from tests.trainer.distributed.rank_pools import image_batch, random_batch
from tests.trainer.policy.tiny_policies import tiny_model
from tests.trainer.vision.vision_models import seeing_model
from tests.waiting import PATIENCE_S
from trainer.distributed.connect_ranks import _answer_asking, _ask_generation
from trainer.distributed.errors import LostRankError, RankError
from trainer.distributed.fingerprint import digest_model, find_versions, require_alike
from trainer.distributed.rank_commands import ANSWER_KEY, END, LeaderChannel, read_batch, write_batch
from trainer.distributed.rank_environment import detect_environment, first_node
from trainer.distributed.settings import DistributedSettings
from trainer.distributed.watchdog import Watchdog
from trainer.vision.image_processor import ImageProcessor

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}  # fmt: skip


def test_batches_travel_unchanged_with_images(tmp_path: Path) -> None:
    processor = ImageProcessor.load(seeing_model(tmp_path))
    assert processor is not None
    for batch in (random_batch(tiny_model(), 0), image_batch(processor, 1)):
        assert read_batch(write_batch(batch)) == batch


def test_ranks_of_torchrun_and_srun_are_detected() -> None:
    environment = detect_environment(TORCHRUN)
    assert environment and (environment.rank, environment.size, environment.host) == (1, 2, "a")
    environment = detect_environment(SRUN)
    assert environment and (environment.rank, environment.size, environment.local_rank) == (3, 4, 1)
    assert environment.host == "gpu03" and environment.port > 1024 and environment.launcher == "srun"
    assert detect_environment({}) is None and detect_environment(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    batch_script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"}
    assert detect_environment(batch_script) is None
    assert [first_node(nodes) for nodes in ("n1", "n1,n2", "a[7]b,c", "")] == ["n1", "n1", "a7b", ""]


@pytest.mark.parametrize("wrong", [{"RANK": "2"}, {"RANK": "x"}, {"MASTER_ADDR": ""}])
def test_broken_environment_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="remedy"):
        detect_environment(TORCHRUN | wrong)


def test_ranks_that_start_again_do_not_read_what_earlier_ones_left_in_the_store() -> None:
    store = HashStore()
    asked: list[str] = []

    def follow() -> None:
        asked.append(_ask_generation(store, 1, timedelta(seconds=PATIENCE_S)))

    for generation in ("first", "second"):
        follower = Thread(target=follow)
        follower.start()
        while follower.is_alive():
            _answer_asking(store, 2, generation)
            follower.join(0.01)
    assert asked == ["first", "second"]


def test_rank_that_ends_when_told_to_is_not_lost() -> None:
    """It may end before rank 0 has the answers of the others."""
    ended, number, store = {1: "ended with exit code 0"}, 1, HashStore()

    def find_ended() -> dict[int, str]:
        store.set(ANSWER_KEY.format(number, 2), "null")
        return ended

    ranks: Any = SimpleNamespace(
        side_store=store, size=3, report=lambda _: None, report_waiting=lambda _: None, settings=DistributedSettings(),
        watchdog=Watchdog(store, 0),
    )  # fmt: skip
    for name, answered, told in ((END, 1, ""), (END, 0, "rank 1 .* during 'end'"), ("save", 1, "rank 1 .* during")):
        channel = LeaderChannel(ranks, find_ended, {1: "rank 1 (m)", 2: "rank 2 (n)"})
        store.delete_key(ANSWER_KEY.format(number, 2))
        if answered:
            store.set(ANSWER_KEY.format(number, 1), "null")
        with pytest.raises(LostRankError, match=told) if told else nullcontext(), channel.command(name):
            pass


def test_first_rank_that_differs_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
    own = {"versions": find_versions(), "settings": {"seed": 0, "out": "a"}, "model files": digest_model(tmp_path)}
    names = {1: "rank 1 (m)", 2: "rank 2 (n)"}
    require_alike(own, [{**own, "settings": None}, {**own, "settings": {"seed": 0, "out": "b"}}], names)
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{ }")
    for kind, other, text in (
        *(("versions", {**find_versions(), name: "0.1"}, f"{name} is '0.1'") for name in ("torch", "Pillow")),
        ("settings", {"seed": 1}, "seed is 1, not 0"),
        ("model files", digest_model(tmp_path), "config.json differs; preprocessor_config.json differs"),
    ):
        with pytest.raises(RankError, match=rf"rank 2 \(n\) has other {kind} than rank 0: .*{text}"):
            require_alike(own, [own, {**own, kind: other}], names)
    assert find_versions()["mtrl-rl"] == version("mtrl-rl")
    assert {"Pillow", "torchvision"} <= own["versions"].keys()
