"""Learning rates: defaults by the size of the model, and rates that are told because nobody uses them."""

from __future__ import annotations

import pytest

from tests.trainer.train.jobs import ROOT
from trainer.cli.run_file import read_run_file
from trainer.policy.optimizers import choose_rates, describe_rates, find_unusual_rate, keep_rates, learning_rate_factor
from trainer.policy.settings import CriticSettings, LoraSettings, UpdateSettings

LORA = LoraSettings()
SIZES = (2_000_000, 100_000_000, 600_000_000, 8_000_000_000)


def test_larger_models_get_smaller_rates_and_adapters_larger_ones() -> None:
    full = [choose_rates(UpdateSettings(), size).lr for size in SIZES]
    assert full == [1e-4, 1e-5, 2e-6, 1e-6]
    assert [choose_rates(UpdateSettings(lora=LORA), size).lr for size in SIZES] == pytest.approx(
        [10 * rate for rate in full if rate]
    )


def test_a_chosen_rate_is_warmed_up_and_one_that_is_set_only_on_request() -> None:
    assert choose_rates(UpdateSettings(), SIZES[0]).warmup == 10
    assert choose_rates(UpdateSettings(), SIZES[0], steps=25).warmup == 3, "at most a tenth of the run"
    assert choose_rates(UpdateSettings(lr=1e-3), SIZES[0]).warmup == 0
    assert choose_rates(UpdateSettings(warmup=4), SIZES[0]).warmup == 4
    chosen = choose_rates(UpdateSettings(), SIZES[0])
    assert learning_rate_factor(0, chosen) == pytest.approx(0.1) and learning_rate_factor(9, chosen) == 1.0


def test_muon_and_the_critic_follow_the_rate() -> None:
    chosen = choose_rates(UpdateSettings(optimizer="muon", critic=CriticSettings()), SIZES[3])
    assert chosen.muon_lr == pytest.approx(2e-5) and chosen.critic and chosen.critic.lr == pytest.approx(1e-5)
    adapters = choose_rates(UpdateSettings(lora=LORA, critic=CriticSettings()), SIZES[3])
    assert adapters.critic and adapters.critic.lr == pytest.approx(1e-5), "the critic is trained as a whole"
    given = choose_rates(UpdateSettings(optimizer="muon", muon_lr=0.02, critic=CriticSettings(lr=1e-3)), SIZES[3])
    assert given.muon_lr == 0.02 and given.critic and given.critic.lr == 1e-3


def test_choosing_twice_changes_nothing() -> None:
    chosen = choose_rates(UpdateSettings(optimizer="muon", critic=CriticSettings()), SIZES[1], steps=30)
    assert choose_rates(chosen, SIZES[3]) == chosen


@pytest.mark.parametrize(
    ("rate", "size", "lora", "says", "range"),
    [
        (
            0.5,
            SIZES[0],
            None,
            "forgets what it can",
            "use 3e-06 to 0.003 for 2 million parameters, all of them trained",
        ),
        (1e-9, SIZES[3], None, "nothing is learned", "use 3e-08 to 3e-05 for 8 billion parameters"),
        (1e-7, SIZES[3], LORA, "nothing is learned", "with LoRA; left out, it is 1e-05"),
    ],
)
def test_rates_that_nobody_uses_are_told_with_the_range_that_is_used(
    rate: float, size: int, lora: LoraSettings | None, says: str, range: str
) -> None:
    unusual = find_unusual_rate(UpdateSettings(lr=rate, lora=lora), size)
    assert unusual is not None
    problem, remedy, is_harmful = unusual
    assert is_harmful is (rate > 0.1), "a dry run fails for too large a rate only"
    assert problem.startswith(f"update.lr is {rate:g}: ") and says in problem and range in remedy


@pytest.mark.parametrize("name", ["default", "second", "sight", "agent", "gsm8k", "gsm8k_feedback"])
def test_shipped_jobs_name_their_rate_which_is_a_usual_one(name: str) -> None:
    update = UpdateSettings.model_validate(
        read_run_file(ROOT / "mtrl_plugins" / "demo" / "jobs" / f"{name}.yaml")["update"]
    )
    size = 500_000_000 if name.startswith("gsm8k") else SIZES[0]
    assert update.lr is not None and update.warmup is not None and find_unusual_rate(update, size) is None


def test_the_rate_is_told_with_its_origin() -> None:
    given = UpdateSettings()
    text = describe_rates(given, choose_rates(given, SIZES[3], 100), SIZES[3])
    assert text == (
        "learning rate 1e-06 after 10 steps of warm-up: the default for 8 billion parameters, all of them trained"
    )
    set_by_user = UpdateSettings(lr=2e-6)
    assert describe_rates(set_by_user, choose_rates(set_by_user, SIZES[3]), SIZES[3]) == (
        "learning rate 2e-06 without warm-up: `update.lr`"
    )
    resumed = describe_rates(set_by_user, choose_rates(set_by_user, SIZES[3]), SIZES[3], is_resumed=True)
    assert resumed.endswith("that of the run, which is resumed")


def test_a_resumed_run_keeps_the_rates_that_it_was_started_with() -> None:
    saved = choose_rates(UpdateSettings(critic=CriticSettings()), SIZES[1], steps=50)
    assert keep_rates(UpdateSettings(critic=CriticSettings()), saved) == saved
    assert keep_rates(UpdateSettings(lr=3e-4), saved).lr == 3e-4, "what is set is compared, and refused"
