"""A step is made whole or not at all, and a run that was broken off goes on to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.policy.made import logprobs, model
from trainer.policy.errors import PolicyError
from trainer.policy.optimizers import share
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings

ROWS = [[1, 2, 3, 4], [7, 8, 9]]


def learned(policy: Policy, steps: int) -> Policy:
    for _ in range(steps):
        (-logprobs(policy, ROWS).sum()).backward()
        policy.step()
    return policy


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_make_what_is_rewarded_likelier(optimizer: str) -> None:
    policy = Policy(model(), UpdateSettings(optimizer=optimizer, lr=2e-2, warmup=2, steps=8))  # type: ignore[arg-type]
    before = logprobs(policy, ROWS).sum().item()
    (-logprobs(learned(policy, 7), ROWS).sum()).backward()
    told = policy.step()
    assert logprobs(policy, ROWS).sum().item() > before + 5
    assert policy.steps == 8 and told["update/lr"] < 2e-2


def test_a_gradient_that_is_not_finite_moves_nothing_and_says_what_to_do() -> None:
    policy = Policy(model(), UpdateSettings())
    before = {name: value.clone() for name, value in policy.weights.items()}
    (logprobs(policy, ROWS).sum() * float("nan")).backward()
    with pytest.raises(PolicyError, match=r"not finite[^\n]*\n  remedy: lower `update.lr`"):
        policy.step()
    assert policy.steps == 0
    assert all(torch.equal(before[name], value) for name, value in policy.weights.items())


def test_the_rate_rises_stays_and_falls() -> None:
    settings = UpdateSettings(warmup=4, steps=14, floor=0.2)
    shares = [share(step, settings) for step in range(20)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0] and shares[4] == 1.0
    assert shares[14:] == pytest.approx([0.2] * 6) and sorted(shares[4:], reverse=True) == shares[4:]
    assert share(100, UpdateSettings()) == 1.0


def test_a_rate_that_falls_in_a_cosine_meets_the_line_at_both_ends_and_halfway() -> None:
    line, curve = (UpdateSettings(warmup=4, steps=14, floor=0.2, fall=fall) for fall in ("line", "cosine"))
    for step in (0, 3, 4, 9, 14, 30):
        assert share(step, curve) == pytest.approx(share(step, line))
    assert share(6, curve) > share(6, line) and share(12, curve) < share(12, line)
    assert share(6, curve) == pytest.approx(0.2 + 0.8 * 0.9045084971874737)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_going_on_from_a_saved_step_gives_the_same_weights_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    update = UpdateSettings(optimizer=optimizer, steps=10)  # type: ignore[arg-type]
    through = learned(Policy(model(), update), 6)
    learned(Policy(model(), update), 3).save(tmp_path)
    again = Policy(model(), update)
    again.resume(tmp_path)
    learned(again, 3)
    assert again.steps == 6
    assert all(torch.equal(value, again.weights[name]) for name, value in through.weights.items())


def test_what_is_saved_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    policy = learned(Policy(model(), UpdateSettings()), 1)
    policy.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(value, policy.weights[name]) for name, value in loaded.state_dict().items())
    again = Policy.load(tmp_path, UpdateSettings(), "cpu")
    assert torch.equal(logprobs(again, ROWS), logprobs(policy, ROWS)) and again.steps == 0


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("spoil", [cut, Path.unlink, lambda file: file.write_bytes(b"")], ids=["cut", "gone", "empty"])
def test_a_file_that_is_not_whole_is_named_with_its_remedy(tmp_path: Path, name: str, spoil) -> None:  # type: ignore[no-untyped-def]
    policy = learned(Policy(model(), UpdateSettings()), 1)
    policy.save(tmp_path)
    spoil(tmp_path / name)
    with pytest.raises(PolicyError) as caught:
        Policy(model(), UpdateSettings()).resume(tmp_path)
    assert str(tmp_path / name) in caught.value.problem and "that is whole" in caught.value.remedy


def test_a_state_of_other_settings_is_refused(tmp_path: Path) -> None:
    learned(Policy(model(), UpdateSettings()), 1).save(tmp_path)
    with pytest.raises(PolicyError, match=r"optimizer\.pt cannot be taken up"):
        Policy(model(), UpdateSettings(optimizer="muon")).resume(tmp_path)


def test_bfloat16_is_near_and_its_weights_stay_float32() -> None:
    near, exact = Policy(model(), UpdateSettings(dtype="bfloat16")), Policy(model(), UpdateSettings(dtype="auto"))
    off = (logprobs(near, ROWS) - logprobs(exact, ROWS)).abs().max()
    assert 0 < off < 0.5
    learned(near, 1)
    assert {value.dtype for value in near.weights.values()} == {torch.float32}
