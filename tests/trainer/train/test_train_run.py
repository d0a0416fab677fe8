"""A whole short run: what it leaves, what it repeats, and how it goes on."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gateway.errors import ConfigError
from tests.trainer.train.jobs import small
from trainer.run.file import Rollouts
from trainer.train.again import again
from trainer.train.compare import compare
from trainer.train.dry import dry_run
from trainer.train.folder import Folder
from trainer.train.start import train

MACHINE = ("time/", "engine/")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def measured(run: Path) -> list[dict[str, Any]]:
    """What the run's numbers are, less those of the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MACHINE)} for line in lines]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    await train(small(), folder, quiet())
    return folder


async def test_a_run_leaves_what_its_folder_promises(run: Path) -> None:
    lines = measured(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for name in ("reward/mean", "reward/outcome", "success/sampled", "loss", "entropy", "kl/old", "mismatch/max"):
        assert all(name in line for line in lines[1:]), name
    assert [("eval/greedy" in line) for line in lines] == [True, False, True, True]
    assert Folder(run).settings() == small()
    assert sorted(one.name for one in (run / "checkpoints").iterdir()) == ["000002", "000003"]


async def test_each_rollout_keeps_what_the_algorithm_saw_and_its_tasks_kind(run: Path) -> None:
    for step in (1, 2, 3):
        learned = [one for one in Rollouts(run) if one.group.startswith(f"{step}-") and one.weighed is not None]
        mean = sum(one.reward or 0.0 for one in learned) / len(learned)
        assert mean == pytest.approx(measured(run)[step]["reward/mean"])
        assert {one.kind for one in learned} <= {"fact", "sum"}


async def test_the_same_settings_give_the_same_run_to_the_bit(run: Path, tmp_path: Path) -> None:
    await train(small(), tmp_path / "twice", quiet())
    assert measured(tmp_path / "twice") == measured(run)


async def test_a_recorded_step_is_made_again_with_the_same_ids_and_the_same_loss(run: Path) -> None:
    console = quiet()
    assert await again(run, 2, console), console.file.getvalue()  # type: ignore[attr-defined]
    assert "16 rollouts of step 2 played again, 0 of them differ" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_success_is_compared_before_and_after(run: Path) -> None:
    comparison = await compare(run, 8, None, quiet())
    told = json.loads(comparison.json)
    for way in ("sampled", "greedy", "sampled_before", "greedy_before"):
        assert 0 <= told[way] <= 1 and told["intervals"][way][0] <= told[way] <= told["intervals"][way][1]
    assert told["by_kind"].keys() == {"fact", "sum"} and told["held_out"] and told["tasks"] == 8


async def test_a_folder_is_not_written_twice_by_mistake(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is a run already\n.*--resume"):
        await train(small(), run, quiet())


async def test_what_is_missing_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"trackio is asked for.*\n.*pip install trackio"):
        await train(small(report=["trackio"]), tmp_path / "run", quiet())
    with pytest.raises(ConfigError, match="trackio is asked for"):
        await dry_run(small(report=["trackio"]), quiet())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds adapters alone\n.*merge"):
        await dry_run(small(model=str(tmp_path)), quiet())
    assert not (tmp_path / "run").exists()


async def test_going_on_with_other_settings_is_refused_and_names_them(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"update.lr was 0.001, and is 0.01"):
        await train(small(update={"lr": 1e-2, "warmup": 1, "steps": 3}), run, quiet(), resume=True)
