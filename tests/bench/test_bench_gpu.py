"""What a GPU would tell is judged, shown and put into the README as it is promised, without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_peak, gpu_table, kills, readme
from tests.trainer.policy.made import model
from trainer.learn.batch import Row
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings

ABOUT = {"date": "2026-11-22", "device": "a GPU that nobody has", "versions": "Python 3.11"}


def found(greedy: float = 0.9, of_plain: float = 0.95) -> dict[str, Any]:
    shape = {"rollout_tokens_per_s": 12345.6, "of_plain": of_plain, "share_of_peak": None}
    told = {"about": ABOUT, "small": False, "default job": {"greedy": greedy}}
    told |= {"Qwen2.5-0.5B": shape, "Qwen2.5-1.5B": dict(shape, of_plain=1.0)}
    return told | {"bars": gpu_table.judged(told)}


def test_what_just_meets_every_bar_is_told_as_met() -> None:
    told = found()
    assert [one["met"] for one in told["bars"]] == [True] * 3
    text = gpu_table.table(told)
    assert "missed" not in text and text.count("| met |") == 3 and "| rollout, tokens/s | 12,346 | 12,346 |" in text


@pytest.mark.parametrize("less", [{"greedy": 0.89}, {"of_plain": 0.949}])
def test_one_bar_that_is_missed_is_told_and_fails_the_run(less: dict[str, float], tmp_path: Path) -> None:
    told = found(**less)
    assert gpu_table.table(told).count("**missed**") == 1
    bench = gpu.Bench(False, (), None, tmp_path)
    bench.told = told
    assert not bench.kept


def test_a_part_that_failed_has_met_nothing() -> None:
    told = found() | {"default job": {"problem": "RuntimeError: no memory"}}
    del told["Qwen2.5-1.5B"]
    told["bars"] = gpu_table.judged(told)
    assert [one["met"] for one in told["bars"]] == [False, True, False]
    text = gpu_table.table(told)
    assert text.count("| nothing | **missed** |") == 2 and "default job: RuntimeError: no memory" in text


async def test_what_is_done_in_small_is_judged_by_nothing_but_that_it_ends(tmp_path: Path) -> None:
    async def work() -> dict[str, float]:
        return {"greedy": 0.0}

    small, whole = (gpu.Bench(is_small, (), None, tmp_path) for is_small in (True, False))
    assert await small.part("default job", work) and small.kept and "bars" not in small.told
    assert await whole.part("default job", work) and not whole.kept


def test_every_part_that_is_promised_is_one_that_runs() -> None:
    parts = {gpu_table.JOB, *(shape.name for shape in gpu.SHAPES["whole"])}
    assert {part for part, *_ in gpu_table.BARS} == parts


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert shutil.which("git") is None and gpu.commit() == "unknown"


def test_the_first_result_takes_the_place_of_the_readmes_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(readme.RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gpu-*"))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    before = "\n".join(f"<!-- {name} -->\n\n\n\n<!-- /{name} -->\n" for name in readme.PARTS)
    (tmp_path / "gpu-2026-11-23.json").write_text(json.dumps(found() | {"small": True}))
    assert "Nothing was measured on a GPU yet" in readme.filled(before)
    (tmp_path / "gpu-2026-11-22.json").write_text(json.dumps(found()))
    after = readme.filled(before)
    assert "measured on a GPU yet" not in after and "On a GPU that nobody has, 2026-11-22" in after
    assert "| rollout, tokens/s | 12,346 | 12,346 |" in after and after.count("| met |") == 3
    assert readme.filled(after) == after


def row(ids: list[int], shared: int = 2) -> Row:
    taught = [place >= shared for place in range(len(ids))]
    return Row("one", ids, taught, [0.0] * len(ids), [1.0] * len(ids), [float(one) for one in taught])


def test_what_siblings_share_is_counted_once_and_logits_only_where_something_is_taught() -> None:
    rows = [row([7, 7, 1]), row([7, 7, 2, 2])]
    assert gpu_peak.computed(rows, tokens=100, alone=False) == (5, 2)
    assert gpu_peak.computed(rows, tokens=4, alone=False) == (7, 3), "nothing is shared between passes"
    assert gpu_peak.computed(rows, tokens=100, alone=True) == (7, 7)


def test_an_updates_arithmetic_is_six_for_each_weight_that_multiplies() -> None:
    network = model(tie_word_embeddings=True)
    policy = Policy(network, UpdateSettings())
    table, every = network.get_input_embeddings().weight.numel(), sum(one.numel() for one in network.parameters())
    assert gpu_peak.operations(policy, 10, 10) == 6 * 10 * every
    assert gpu_peak.operations(policy, 10, 1) == 6 * (10 * (every - table) + table)


def test_limits_that_are_not_the_jobs_are_told_of() -> None:
    limits = kills._about()["limits"]
    assert f"{kills.WALL_S} s" in limits and "120" in limits
