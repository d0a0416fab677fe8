"""A policy that nobody holds any more is freed at once: on a GPU, gigabytes would wait for the garbage collector."""

from __future__ import annotations

import gc
from typing import Literal
from weakref import ref

import pytest

from tests.trainer.policy.tiny_policies import example_batch, tiny_model
from trainer.algorithms.settings import AlgorithmSettings
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_policy_is_freed_without_the_garbage_collector(dtype: Literal["bfloat16", "float32"]) -> None:
    batch, policy = example_batch(tiny_model()), Policy(tiny_model(), UpdateSettings(dtype=dtype, lr=1e-3))
    updater = PolicyUpdater(policy, AlgorithmSettings(), exact=False)
    updater.train_step(batch)
    held = [ref(policy.model), *map(ref, policy.model.parameters()), *map(ref, policy._trained.values())]
    gc.disable()
    try:
        del policy, updater
        assert [held() for held in held] == [None] * len(held)
    finally:
        gc.enable()
