"""Tests of the GPU benchmark that need no GPU: its table, bars, FLOPs and part of the results page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_flops, gpu_table
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


@pytest.mark.parametrize("less", [{"greedy": 0.89}, {"of_plain": 0.949}])
def test_a_missed_bar_is_shown_and_fails_the_run(less: dict[str, float], tmp_path: Path) -> None:
    results = make_results(**less)
    assert gpu_table.format_results(results).count("**missed**") == 1
    bench = gpu.GpuBench(False, (), None, tmp_path)
    bench.results = results
    assert not bench.meets_bars


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
