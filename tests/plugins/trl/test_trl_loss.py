"""Differential tests: our losses beside TRL's own code, which `make peers` installs, with translated settings."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from mtrl_plugins.trl.job_parts import translate_arguments
from tests.trainer.algorithms.reference_loops import make_batch
from trainer.algorithms.loss import StepTotals, compute_loss
from trainer.algorithms.named_algorithms import ALGORITHMS
from trainer.algorithms.settings import AlgorithmSettings

FILE = Path(__file__).parents[3] / ".peers" / "trl" / "trainer" / "grpo_trainer.py"
ROWS, PROMPT = 4, 1
TRL_DEVIATION = "advantages / (std_rewards + 1e-4)"


def load_loss() -> Callable[[Any, None, dict[str, Any]], Tensor]:
    """TRL's method, without its class and TRL's dependencies."""
    (trainer,) = (
        node for node in ast.parse(FILE.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer"
    )  # fmt: skip
    (method,) = (node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss")
    names: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([method], []), str(FILE), "exec"), names)
    return names["_compute_loss"]  # type: ignore[no-any-return]


def translated(**arguments: Any) -> AlgorithmSettings:
    made = translate_arguments({"max_steps": 1, **arguments}, None, 16).settings["algorithm"]
    return AlgorithmSettings.model_validate({**made, "mismatch": {"truncate": "never"}})


CASES: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "beta": 0.3},
    {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False, "delta": 1.3},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "bnpo", "beta": 0.3},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 32},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "dapo", "entropy_coef": 0.2},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "a row wholly masked"])
def test_loss_and_gradient_of_translated_settings_equal_trls(arguments: dict[str, Any], masked: bool) -> None:
    made, advantages = make_batch(3, ROWS), [0.7, -1.2, -0.4, 1.1]
    rows = [
        replace(
            row,
            weights=[0.0 if masked and index == 1 else float(weight > 0) for weight in row.weights],
            advantages=[advantages[index] * written for written in row.mask],
        )
        for index, row in enumerate(made.rows)
    ]
    made.rows = rows
    settings = translated(mask_truncated_completions=True, **arguments)
    batch = made.batch()
    ours_T = made.logprobs()
    totals = StepTotals(sum(sum(row.weights) for row in rows), ROWS)
    ours = compute_loss(ours_T, batch, totals, settings, -(ours_T.exp() * ours_T)).value
    ours.backward()

    width = max(len(row.ids) for row in rows)

    def padded(lists: Any) -> Tensor:
        return torch.tensor([[*values, *[0.0] * (width - len(values))] for values in lists], dtype=torch.float64)

    mask = padded([row.weights for row in rows])
    theirs = padded(made.new).requires_grad_()
    options = {
        "beta": 0.0, "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2,
        "max_completion_length": 512, "use_bias_correction_kl": True, "delta": None, "entropy_coef": 0.0, **arguments,
    }  # fmt: skip
    options.setdefault("epsilon_high", options["epsilon"])
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (theirs, -(theirs.exp() * theirs), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        epsilon_low=options["epsilon"], current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=bool(options["entropy_coef"]), use_adaptive_entropy=False,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        accelerator=MagicMock(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        args=SimpleNamespace(steps_per_generation=1, **options), **options,
    )  # fmt: skip
    ids = torch.zeros(ROWS, PROMPT, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": mask.long(), "completion_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float64), "old_per_token_logps": padded(made.old),
        "ref_per_token_logps": padded(made.ref), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = load_loss()(trainer, None, inputs)
    loss.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-9)
    lengths = [len(row.ids) for row in rows]
    expected = torch.cat([row[:length] for row, length in zip(theirs.grad, lengths, strict=True)])  # type: ignore[arg-type]
    torch.testing.assert_close(ours_T.grad, expected, atol=1e-9, rtol=0)


def test_deviation_of_translated_settings_is_trls() -> None:
    assert TRL_DEVIATION in FILE.read_text("utf-8")
    rewards = torch.tensor([0.0, 1e-3, 2e-3, 1e-3], dtype=torch.float64)
    epsilon = translated(loss_type="grpo").deviation_epsilon
    ours = ALGORITHMS["grpo"].advantages(rewards, torch.zeros(4, dtype=torch.long), epsilon)
    torch.testing.assert_close(ours, (rewards - rewards.mean()) / (rewards.std() + 1e-4), atol=1e-12, rtol=0)
