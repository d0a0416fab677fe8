"""Tests of the GPU benchmark that need no GPU: its table, bars, FLOPs and part of the results page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_flops, gpu_table, kills, readme
from tests.trainer.policy.tiny_policies import tiny_model
from trainer.algorithms.packing import BatchRow
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings

ABOUT = {"date": "2026-11-22", "device": "an imaginary GPU", "versions": "Python 3.11"}


def make_results(greedy: float = 0.9, of_plain: float = 0.95) -> dict[str, Any]:
    shape = {"rollout_tokens_per_s": 12345.6, "of_plain": of_plain, "share_of_peak": None}
    results = {"about": ABOUT, "small": False, "default job": {"greedy": greedy}}
    results |= {"Qwen2.5-0.5B": shape, "Qwen2.5-1.5B": dict(shape, of_plain=1.0)}
    return results | {"bars": gpu_table.check_bars(results)}


def test_values_equal_to_the_bars_meet_them() -> None:
    results = make_results()
    assert [bar["met"] for bar in results["bars"]] == [True] * 3
    text = gpu_table.format_results(results)
    assert "missed" not in text and text.count("| met |") == 3 and "| rollout, tokens/s | 12,346 | 12,346 |" in text


@pytest.mark.parametrize("less", [{"greedy": 0.89}, {"of_plain": 0.949}])
def test_a_missed_bar_is_shown_and_fails_the_run(less: dict[str, float], tmp_path: Path) -> None:
    results = make_results(**less)
    assert gpu_table.format_results(results).count("**missed**") == 1
    bench = gpu.GpuBench(False, (), None, tmp_path)
    bench.results = results
    assert not bench.meets_bars


def test_a_failed_part_misses_its_bar() -> None:
    results = make_results() | {"default job": {"problem": "RuntimeError: no memory"}}
    del results["Qwen2.5-1.5B"]
    results["bars"] = gpu_table.check_bars(results)
    assert [bar["met"] for bar in results["bars"]] == [False, True, False]
    text = gpu_table.format_results(results)
    assert text.count("| nothing | **missed** |") == 2 and "default job: RuntimeError: no memory" in text


async def test_a_small_run_has_no_bars(tmp_path: Path) -> None:
    async def work() -> dict[str, float]:
        return {"greedy": 0.0}

    small, full = (gpu.GpuBench(is_small, (), None, tmp_path) for is_small in (True, False))
    assert await small.run_part("default job", work) and small.meets_bars and "bars" not in small.results
    assert await full.run_part("default job", work) and not full.meets_bars


def test_every_part_with_a_bar_is_run() -> None:
    parts = {gpu_table.JOB, *(shape.name for shape in gpu.SHAPES["whole"])}
    assert {part for part, *_ in gpu_table.BARS} == parts


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert shutil.which("git") is None and gpu.find_commit() == "unknown"


def test_the_first_results_replace_the_sentence_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(readme.RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gpu-*"))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    before = "\n".join(f"<!-- {name} -->\n\n\n\n<!-- /{name} -->\n" for name in readme.PARTS)
    (tmp_path / "gpu-2026-11-23.json").write_text(json.dumps(make_results() | {"small": True}))
    assert "Nothing was measured on a GPU yet" in readme.filled(before)
    (tmp_path / "gpu-2026-11-22.json").write_text(json.dumps(make_results()))
    after = readme.filled(before)
    assert "measured on a GPU yet" not in after and "On an imaginary GPU, 2026-11-22" in after
    part = after.partition("<!-- gpu -->")[2].partition("<!-- /gpu -->")[0]
    assert "| rollout, tokens/s | 12,346 | 12,346 |" in part and part.count("| met |") == 3
    assert readme.filled(after) == after


def make_row(ids: list[int], shared: int = 2) -> BatchRow:
    mask = [index >= shared for index in range(len(ids))]
    return BatchRow("row", ids, mask, [0.0] * len(ids), [1.0] * len(ids), [float(is_trained) for is_trained in mask])


def test_shared_prefixes_are_counted_once_and_logits_only_for_trained_tokens() -> None:
    rows = [make_row([7, 7, 1]), make_row([7, 7, 2, 2])]
    assert gpu_flops.count_computed(rows, max_tokens=100, share_prefixes=True) == (5, 2)
    assert gpu_flops.count_computed(rows, max_tokens=4, share_prefixes=True) == (7, 3), "not between micro-batches"
    assert gpu_flops.count_computed(rows, max_tokens=100, share_prefixes=False) == (7, 7)


def test_an_update_takes_six_flops_per_multiplying_weight_and_token() -> None:
    network = tiny_model(tie_word_embeddings=True)
    policy = Policy(network, UpdateSettings())
    table, total = network.get_input_embeddings().weight.numel(), sum(weight.numel() for weight in network.parameters())
    assert gpu_flops.update_flops(policy, 10, 10) == 6 * 10 * total
    assert gpu_flops.update_flops(policy, 10, 1) == 6 * (10 * (total - table) + table)


def test_changed_limits_are_reported() -> None:
    limits = kills.describe_environment()["limits"]
    assert f"{kills.WALL_S} s" in limits and "120" in limits
