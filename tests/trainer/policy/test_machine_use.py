"""Tests what a run says of its machine's processors, memory and GPUs."""

from __future__ import annotations

import os
from itertools import count

import pytest
import torch

from tests.metrics_page import describe_metric, is_repeated
from tests.waiting import wait_until
from trainer.policy import machine_use
from trainer.policy.machine_use import MachineUse


def test_busy_processors_and_memory_are_measured_since_the_last_time() -> None:
    machine = MachineUse()
    started = os.times().user
    for _ in count():
        if os.times().user - started > 0.2:
            break
    metrics = machine.take_metrics()
    assert 0 < metrics["machine/cores_of_trainer"] <= metrics["machine/cores"] + 0.5
    assert metrics["machine/cores"] <= (os.cpu_count() or 1) + 0.5 and metrics["machine/memory_gb"] > 0.01
    assert all(describe_metric(name) and not is_repeated(name) for name in metrics)


async def test_gpus_are_looked_at_while_the_run_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_use, "SAMPLE_S", 0.01)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: device)  # Only one is used by this process.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, (2 + device) * 1e9))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 50 * (device + 1))
    with MachineUse() as machine:
        seen: dict[str, float] = {}
        await wait_until(lambda: seen.update(machine.take_metrics()) or "machine/gpu/1" in seen)
    assert (seen["machine/gpu/0"], seen["machine/gpu/1"]) == (0.5, 1.0)
    assert "machine/gpu_memory_gb/0" not in seen and seen["machine/gpu_memory_gb/1"] == 2.0
    assert all(describe_metric(name) for name in seen)


def test_the_most_memory_of_each_phase_is_told_apart() -> None:
    machine = MachineUse()
    with machine.phase("update"):
        torch.ones(2**25).sum()
    with machine.phase("publishing"):
        pass
    with machine.phase("update"):
        pass
    metrics = machine.take_metrics()
    apart = metrics["machine/peak_gb/update"] - metrics["machine/peak_gb/publishing"]
    assert 0.9 < apart / (4 * 2**25 / 1e9) < 1.3, "one phase had these numbers, for a while"
    assert describe_metric("machine/peak_gb/update") and not is_repeated("machine/peak_gb/update")
    assert not {name for name in machine.take_metrics() if "peak" in name}


def test_on_a_gpu_a_phase_takes_what_others_have_and_the_most_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"mem_get_info": (1e9, 10e9), "memory_reserved": 5e9, "max_memory_allocated": 3e9}
    for name, value in (calls | {"is_available": True, "reset_peak_memory_stats": None}).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    machine = MachineUse()
    with machine.phase("generating"):
        pass
    assert machine.take_metrics()["machine/peak_gb/generating"] == 10 - 1 - 5 + 3
