"""What metrics lead to: alarms, each with its likely cause and remedy, raised once, and the early end of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import inf, nan
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from tests.trainer.train.trainings import Run, list_checkpoints, read_run_metrics, user_reward, write_config
from trainer.train.alarms import ALARMS, LIMIT_SETTINGS, QUIET_STEPS, Alarms
from trainer.train.early_stop import EarlyStop
from trainer.train.settings import EarlyStopSettings, TrainSettings

Metrics = dict[str, float]
HEALTHY: Metrics = {
    "reward/mean": 0.5, "success/sampled": 0.5, "entropy": 0.8, "groups/teaching": 12.0, "kl/old": 0.001,
    "kl/reference": 0.02, "mismatch/kl": 1e-9, "rollout/count": 128.0, "rollout/lost": 0.0, "rollout/turns": 2.5,
    "rollout/truncated": 0.0, "stops/done": 1.0,
}  # fmt: skip


def check_steps(*steps: Metrics, reasons: Mapping[str, int] = {}, n: int = 8, vocabulary: int = 1000) -> list[str]:
    """The alarms over these steps; metrics that are not given are healthy."""
    alarms = Alarms(n, vocabulary)
    return [alarm for step in steps for alarm in alarms.check(HEALTHY | step, reasons)]


def test_healthy_run_raises_no_alarm() -> None:
    climbing = [
        {"reward/mean": step / 50, "success/sampled": step / 50, "entropy": 1 - step / 60} for step in range(50)
    ]
    evaluated = [
        step | ({"eval/greedy": step["success/sampled"]} if place % 5 == 0 else {})
        for place, step in enumerate(climbing)
    ]
    assert check_steps(*evaluated) == []


def test_failing_tools_raise_an_alarm_with_the_commonest_outcome() -> None:
    calls = {"engine/outcomes/ok": 50.0, "engine/outcomes/timeout": 40.0, "engine/outcomes/error": 5.0}
    (alarm,) = check_steps(calls)
    assert alarm.startswith("47% of the calls fail; 40 of 95 calls end as `timeout`")
    assert check_steps(calls | {"engine/outcomes/ok": 500.0}) == []
    assert check_steps({"engine/outcomes/error": 5.0}) == [], "so few say nothing"
    assert check_steps({"engine/outcomes/invalid": 95.0}) == [], "what the policy gets wrong is no tool's failure"


@pytest.mark.parametrize(
    ("success", "means", "remedy"),
    [
        (1.0, "100% succeed: the tasks have become too easy", "harder tasks"),
        (0.0, "0% succeed", "`curriculum`"),
        (0.5, "hardly on the attempt", "`n`"),
    ],
)
def test_no_learning_signal_raises_an_alarm_with_its_likely_cause(success: float, means: str, remedy: str) -> None:
    (alarm,) = check_steps({"groups/teaching": 0.0, "success/sampled": success})
    assert alarm.startswith("no group has a learning signal: ")
    assert means in alarm and remedy in alarm.partition("remedy: ")[2]


def test_without_a_signal_a_kl_term_that_trains_is_told() -> None:
    (alarm,) = check_steps({"groups/teaching": 0.0, "update/tokens": 300.0})
    assert "so only the KL term trained" in alarm and "changed nothing" not in alarm


def test_tool_use_that_fades_raises_an_alarm_unless_the_tasks_are_solved() -> None:
    first, last = [{"rollout/calls": 2.0}] * 5, [{"rollout/calls": 0.1}] * 5
    (alarm,) = check_steps(*first, *last)
    assert alarm.startswith("the policy hardly calls tools any more: 0.1 calls a rollout, 2 at the start; 50% succeed")
    assert check_steps(*first, *last[:2]) == [], "a few steps may be chance"
    assert check_steps(*first, *({**step, "success/sampled": 0.97} for step in last)) == []
    assert check_steps(*[{"rollout/calls": 0.1}] * 5, *[{"rollout/calls": 0.0}] * 5) == [], "there was none to fade"


def test_entropy_collapse_raises_an_alarm_unless_the_tasks_are_solved() -> None:
    (alarm,) = check_steps({}, {}, {"entropy": 0.01, "success/sampled": 0.4})
    assert alarm.startswith("the entropy has collapsed: 0.01 nats per token, 0.54 at the start; 40% succeed")
    assert check_steps({"entropy": 0.015}, {"entropy": 0.01}) == []  # It was never much.


def evaluated_steps(success: Iterable[float], greedy: float = 0.0) -> list[Metrics]:
    """40 steps on which the reward climbs, and every tenth an evaluation that finds so much more than the last."""
    steps: list[Metrics] = [
        {"reward/mean": 0.2 + place / 50, "success/sampled": one} for place, one in enumerate(success)
    ]
    return [{"reward/mean": 0.2, "eval/greedy": 0.3}] + [
        step | ({"eval/greedy": 0.3 + greedy * (place // 10 + 1)} if place % 10 == 9 else {})
        for place, step in enumerate(steps)
    ]


def test_reward_that_rises_without_success_raises_a_reward_hacking_alarm() -> None:
    (alarm,) = check_steps(*evaluated_steps([0.3, 0.32] * 20))
    assert alarm.startswith("the reward rose from 0.29 to ")
    assert "greedy success on the evaluation tasks did not: 30% then, 30% now" in alarm
    assert "reward hacking" in alarm and "`mtrl-train show`" in alarm


def test_sampled_success_without_greedy_success_raises_a_sharpening_alarm() -> None:
    (alarm,) = check_steps(*evaluated_steps([0.2 + place / 60 for place in range(40)]))
    assert "becomes surer of what it could do already" in alarm


@pytest.mark.parametrize(
    ("metrics", "seen", "setting"),
    [
        ({"mismatch/kl": 0.05}, "mismatch/kl is 0.05 nats", "algorithm.mismatch.truncate"),
        ({"kl/old": 0.3}, "kl/old is 0.3 nats", "update.lr"),
        ({"kl/reference": 14.0}, "kl/reference is 14 nats", "algorithm.kl.coefficient"),
    ],
)
def test_large_divergences_raise_alarms_with_their_setting(metrics: Metrics, seen: str, setting: str) -> None:
    (alarm,) = check_steps(metrics)
    assert seen in alarm.splitlines()[0]
    assert setting in alarm.splitlines()[2]


def test_alarm_is_raised_once_until_the_run_was_healthy_for_a_while() -> None:
    bad, well = {"groups/teaching": 0.0}, {}
    assert len(check_steps(bad, bad, bad)) == 1
    assert len(check_steps(bad, *[well] * (QUIET_STEPS - 1), bad)) == 1
    assert len(check_steps(bad, *[well] * QUIET_STEPS, bad)) == 2


def test_resumed_run_does_not_repeat_alarms() -> None:
    alarms, again = Alarms(), Alarms()
    past = [HEALTHY | {"mismatch/kl": 1.0} for _ in range(3)]
    assert [len(alarms.check(step)) for step in past] == [1, 0, 0]
    for step in past:
        again.check(step)
    assert alarms.check(past[0]) == again.check(past[0]) == []


@pytest.mark.parametrize("metrics", [{}, dict.fromkeys(HEALTHY, nan), {"eval/greedy": nan}, {"kl/old": inf}])
def test_missing_or_non_finite_metrics_raise_no_alarm(metrics: Metrics) -> None:
    assert Alarms().check(metrics) == []


def every_alarm() -> list[str]:
    cut: list[Metrics] = [{f"stops/{stop}": 1.0} for stop in LIMIT_SETTINGS]
    none: list[Metrics] = [{"groups/teaching": 0.0, "success/sampled": success} for success in (0.0, 0.5, 1.0)]
    far: list[Metrics] = [{"mismatch/kl": 1.0}, {"kl/old": 1.0}, {"kl/reference": 99.0}, {"rollout/lost": 99.0}]
    texts = [text for step in [*cut, *none, *far] for text in check_steps(step)]
    texts += check_steps({"rollout/logprob": -6.9}) + check_steps({"groups/teaching": 0.0}, n=1)
    texts += check_steps({"stops/length_rollout": 1.0, "rollout/turns": 0.0}) + check_steps({"rollout/lost_to/a": 9.0})
    texts += (
        check_steps({}, {"entropy": 0.0})
        + check_steps(*evaluated_steps([0.3] * 40))
        + check_steps(*evaluated_steps([place / 40 for place in range(40)]))
    )
    return texts


def test_every_alarm_names_existing_settings() -> None:
    named = {
        name for text in every_alarm() for name in re.findall(r"`([a-z_.]+)(?:: \w+)?`", text.partition("remedy")[2])
    }
    assert len(every_alarm()) >= len(ALARMS)
    assert {"update.lr", "limits.turn_tokens", "n", "reward"} <= named
    for name in named:
        model: type[BaseModel] = TrainSettings
        for part in name.split("."):
            field = model.model_fields[part]
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)


def ends(settings: EarlyStopSettings | None, *history: dict[str, float]) -> bool:
    return EarlyStop(settings, history).reason is not None


def sampled(*values: float) -> list[dict[str, float]]:
    return [{"step": float(step), "success/sampled": value} for step, value in enumerate(values, 1)]


def evaluated(value: float, *, tasks: int = 50, lost: int = 0) -> dict[str, float]:
    return {"eval/greedy": value, "eval/tasks": float(tasks), "eval/lost": float(lost)}


def test_success_in_training_is_the_mean_of_a_full_window() -> None:
    settings = EarlyStopSettings(training=0.9)
    assert not ends(settings, *sampled(1, 1, 1, 1))
    assert ends(settings, *sampled(0, 0, 1, 1, 1, 1, 0.6))
    assert not ends(settings, *sampled(1, 1, 1, 1, 1, 0.4))
    assert not ends(None, *sampled(1, 1, 1, 1, 1))


def test_only_an_evaluation_that_is_whole_ends_a_run() -> None:
    settings = EarlyStopSettings(evaluation=0.9)
    assert ends(settings, evaluated(0.9)) and not ends(settings, evaluated(0.89))
    assert not ends(settings, evaluated(1.0, tasks=5, lost=45))
    assert not ends(settings, *sampled(1, 1, 1, 1, 1))


def test_a_run_goes_on_until_both_bounds_hold() -> None:
    settings, learned = EarlyStopSettings(training=0.5, evaluation=0.9), sampled(1, 1, 1, 1, 1)
    assert not ends(settings, *learned) and not ends(settings, evaluated(1.0))
    assert ends(settings, evaluated(1.0), *learned)


@pytest.mark.parametrize(
    "changes", [{"early_stop": {}}, {"early_stop": {"evaluation": 0.9}, "evaluation": {"every": 0}}]
)
def test_a_bound_that_could_never_be_reached_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"early_stop"):
        TrainSettings.model_validate(changes)


def test_a_run_that_has_learned_ends_evaluated_and_saved_and_is_not_begun_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.train.early_stop.WINDOW", 2)
    config = write_config(
        reward=user_reward("return 1.0"), early_stop={"training": 1}, steps=9,
        evaluation={"every": 5, "rows": 1, "final_rows": 1}, algorithm={"name": "grpo"},
    )  # fmt: skip
    output = run("--config", config, "--out", "r")
    assert "the run ends after step 2 of 9: 100.0% of the last 2 steps' rollouts succeeded" in output
    assert "2 steps are finished" in output
    metrics = read_run_metrics("r")
    assert [line["step"] for line in metrics] == [0, 1, 2] and metrics[-1]["eval/tasks"] == 1
    assert list_checkpoints("r")[-1] == "000002"
    assert "the run ends after step 2 of 9" in run("--resume", "--out", "r")
    assert len(read_run_metrics(Path("r"))) == 3
