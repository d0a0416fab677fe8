"""Learning rates: defaults by the size of the model, and rates that are told because nobody uses them."""

from __future__ import annotations

import pytest

from tests.trainer.train.jobs import ROOT
from trainer.cli.run_file import read_run_file
from trainer.policy.optimizers import choose_rates, find_unusual_rate, keep_choices, learning_rate_factor
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
    assert choose_rates(UpdateSettings(), SIZES[0]).warmup_steps == 10
    assert choose_rates(UpdateSettings(), SIZES[0], steps=25).warmup_steps == 3, "at most a tenth of the run"
    assert choose_rates(UpdateSettings(lr=1e-3), SIZES[0]).warmup_steps == 0
    assert choose_rates(UpdateSettings(warmup_steps=4), SIZES[0]).warmup_steps == 4
    chosen = choose_rates(UpdateSettings(), SIZES[0])
    assert learning_rate_factor(0, chosen) == pytest.approx(0.1) and learning_rate_factor(9, chosen) == 1.0


@pytest.mark.parametrize("name", ["default", "second", "sight", "agent", "gsm8k", "gsm8k_feedback"])
def test_shipped_jobs_name_their_rate_which_is_a_usual_one(name: str) -> None:
    update = UpdateSettings.model_validate(
        read_run_file(ROOT / "mtrl_plugins" / "demo" / "jobs" / f"{name}.yaml")["update"]
    )
    size = 500_000_000 if name.startswith("gsm8k") else SIZES[0]
    assert update.lr is not None and update.warmup_steps is not None and find_unusual_rate(update, size) is None


def test_a_resumed_run_keeps_the_rates_that_it_was_started_with() -> None:
    saved = choose_rates(UpdateSettings(critic=CriticSettings()), SIZES[1], steps=50)
    assert saved.decay_steps == 50, "by default the last step of the run"
    assert keep_choices(UpdateSettings(critic=CriticSettings()), saved) == saved, "also if it goes on for more steps"
    assert keep_choices(UpdateSettings(lr=3e-4), saved).lr == 3e-4, "what is set is compared, and refused"
