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
from trainer.policy.update import PolicyUpdater

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


def make_trainer(logprobs: Tensor, entropies: Tensor, arguments: dict[str, Any]) -> SimpleNamespace:
    """What TRL's method reads of its trainer."""
    options = {
        "beta": 0.0, "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2,
        "max_completion_length": 512, "use_bias_correction_kl": True, "delta": None, "entropy_coef": 0.0,
        "use_adaptive_entropy": False, **arguments,
    }  # fmt: skip
    options.setdefault("epsilon_high", options["epsilon"])
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        epsilon_low=options["epsilon"], current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=bool(options["entropy_coef"] or options["use_adaptive_entropy"]),
        _last_world_entropy=float("inf"), _entropy_window_stats=None,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        accelerator=MagicMock(
            num_processes=1, sync_gradients=True,
            gather=lambda value: value, reduce=lambda value, reduction: value,
        ),
        args=SimpleNamespace(steps_per_generation=1, **options), **options,
    )  # fmt: skip


def test_adaptive_bonus_follows_trls_own_controller() -> None:
    arguments = {
        "loss_type": "dapo", "use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 0.3,
        "entropy_coef_delta": 0.03, "entropy_coef_min": 0.01, "entropy_coef_max": 0.06,
    }  # fmt: skip
    ones, ids = torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ones.long(), "completion_mask": ones,
        "advantages": torch.zeros(2, dtype=torch.float64), "old_per_token_logps": -ones,
        "num_items_in_batch": ones.sum(),
    }  # fmt: skip
    theirs = make_trainer(-ones, ones, arguments)
    loss_of = load_loss()
    state: dict[str, Any] = {}
    ours: Any = SimpleNamespace(_algorithm=translated(**arguments), _policy=SimpleNamespace(step_state=state))
    for entropy in (0.5, 0.3, 0.1, 0.2, 0.9, 0.2, 0.2):
        theirs._get_per_token_logps_and_entropies = lambda *_, value=entropy, **__: (-ones, value * ones, None)
        bonus = float(loss_of(theirs, None, inputs))
        assert -PolicyUpdater._with_entropy_bonus(ours).entropy_coefficient * entropy == pytest.approx(bonus)
        PolicyUpdater._adapt_entropy_bonus(ours, entropy)
        assert state["entropy_coefficient"] == pytest.approx(theirs.entropy_coef)


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
    trainer = make_trainer(theirs, -(theirs.exp() * theirs), arguments)
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
