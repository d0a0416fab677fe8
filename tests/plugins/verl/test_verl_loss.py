"""Differential tests: our losses beside verl's own code, which `make peers` installs, with the settings of its keys."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrl_plugins.scripts.translate import translate
from mtrl_plugins.verl.conversions import VERL_TABLE
from mtrl_plugins.verl.read_config import read_command
from tests.trainer.algorithms.reference_loops import make_batch
from trainer.algorithms.loss import StepTotals, compute_loss
from trainer.algorithms.settings import AlgorithmSettings

VERL = Path(__file__).parents[3] / ".peers" / "verl"
LOSSES = {
    "agg_loss", "compute_policy_loss_vanilla", "compute_policy_loss_gspo", "compute_policy_loss_cispo", "kl_penalty",
    "kl_penalty_forward",
}  # fmt: skip
NEEDED = (
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.rollout.n=8",
    "data.train_files=rows.jsonl",
    "trainer.total_training_steps=1",
)
ACTOR = "actor_rollout_ref.actor"


class ActorConfig(SimpleNamespace):
    """Stands for verl's own, whose module needs the rest of verl."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def load_functions(file: str, wanted: set[str], names: dict[str, Any]) -> Any:
    """Some of verl's functions, without verl's dependencies."""
    path = VERL / file
    body = [
        node for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]  # fmt: skip
    assert {node.name for node in body} == wanted
    for node in body:
        node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *body], []), str(path), "exec"), names)
    return SimpleNamespace(**names)


masks = load_functions("utils/torch_functional.py", {"masked_sum", "masked_mean"}, {"torch": torch})
core_algos = load_functions(
    "trainer/ppo/core_algos.py",
    LOSSES,
    {"torch": torch, "verl_F": masks, "ActorConfig": ActorConfig, "AlgoConfig": type("AlgoConfig", (), {})},
)


def translated(*words: str) -> AlgorithmSettings:
    settings = translate(read_command([*words, "algorithm.adv_estimator=grpo", *NEEDED]), VERL_TABLE).settings
    return AlgorithmSettings.model_validate({**settings["algorithm"], "mismatch": {"truncate": "never"}})


KL = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.3")
CASES: list[tuple[str, tuple[str, ...]]] = [
    ("vanilla", ()),
    ("vanilla", (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.clip_ratio_c=1.3")),
    ("vanilla", (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=32",
                 f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")),
    ("vanilla", (*KL, f"{ACTOR}.kl_loss_type=low_var_kl")),
    ("vanilla", (f"{ACTOR}.entropy_coeff=0.2", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")),
    ("gspo", (f"{ACTOR}.policy_loss.loss_mode=gspo",)),
    ("cispo", (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_high=0.28")),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "words"), CASES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "a row wholly masked"])
def test_loss_and_gradient_of_translated_keys_equal_verls(mode: str, words: tuple[str, ...], masked: bool) -> None:
    settings = translated(*words)
    made, advantages = make_batch(3), [0.7, -1.2, -0.4, 1.1]
    made.rows = [
        replace(
            row,
            weights=[0.0 if masked and index == 1 else float(weight > 0) for weight in row.weights],
            advantages=[advantages[index] * written for written in row.mask],
        )
        for index, row in enumerate(made.rows)
    ]
    batch, ours_T = made.batch(), made.logprobs()
    weights = [sum(row.weights) for row in made.rows]
    totals = StepTotals(sum(weights), sum(weight > 0 or settings.count_untrained for weight in weights))
    entropy_T = -(ours_T.exp() * ours_T)
    ours = compute_loss(ours_T, batch, totals, settings, entropy_T).value
    ours.backward()

    given = dict(word.split("=", 1) for word in words)
    kind = given.get(f"{ACTOR}.loss_agg_mode", "token-mean")
    lengths = [len(row.ids) for row in made.rows]
    width = int(given.get("data.max_response_length", max(lengths)))

    def padded(lists: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([[*values, *[0.0] * (width - len(values))] for values in lists], dtype=torch.float64)

    mask, theirs = padded([row.weights for row in made.rows]), padded(made.new).requires_grad_()
    config = ActorConfig(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=float(given.get(f"{ACTOR}.clip_ratio_high", 0.2)),
        clip_ratio_c=float(given.get(f"{ACTOR}.clip_ratio_c", 3.0)), global_batch_info={},
    )  # fmt: skip
    loss, _ = getattr(core_algos, f"compute_policy_loss_{mode}")(
        padded(made.old), theirs, padded([row.advantages for row in made.rows]), mask, kind, config
    )
    if settings.kl.coefficient:
        penalty = core_algos.kl_penalty(theirs, padded(made.ref), words[-1].partition("kl_loss_type=")[2])
        loss = loss + settings.kl.coefficient * core_algos.agg_loss(penalty, mask, kind)
    if bonus := float(given.get(f"{ACTOR}.entropy_coeff", 0)):
        loss = loss - bonus * core_algos.agg_loss(-(theirs.exp() * theirs), mask, kind)
    loss.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-8)
    assert theirs.grad is not None
    expected = torch.cat([row[:length] for row, length in zip(theirs.grad, lengths, strict=True)])
    torch.testing.assert_close(ours_T.grad, expected, atol=1e-8, rtol=0)
