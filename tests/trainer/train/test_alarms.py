"""Alarms: each with its observation, likely cause and remedy, raised once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import inf, nan

import pytest
from pydantic import BaseModel

from trainer.rollout.rollout import StopReason
from trainer.train.alarms import ALARMS, LIMIT_SETTINGS, QUIET_STEPS, Alarms
from trainer.train.settings import TrainSettings

Metrics = dict[str, float]
HEALTHY: Metrics = {
    "reward/mean": 0.5,
    "success/sampled": 0.5,
    "entropy": 0.8,
    "groups/teaching": 12.0,
    "kl/old": 0.001,
    "kl/reference": 0.02,
    "mismatch/kl": 1e-9,
    "rollout/count": 128.0,
    "rollout/lost": 0.0,
    "rollout/turns": 2.5,
    "rollout/truncated": 0.0,
    "stops/done": 1.0,
}


def check_steps(*steps: Metrics, reasons: Mapping[str, int] = {}, n: int = 8, vocabulary: int = 1000) -> list[str]:
    """The alarms over these steps; metrics that are not given are healthy."""
    alarms = Alarms(n, vocabulary)
    return [alarm for step in steps for alarm in alarms.check(HEALTHY | step, reasons)]


def test_single_rollouts_are_told_as_such_and_not_as_hard_tasks() -> None:
    (alarm,) = check_steps({"groups/teaching": 0.0, "success/sampled": 0.0}, n=1)
    assert alarm.startswith("no group has a learning signal: each has a single rollout") and "too hard" not in alarm
    assert "set `n` to 8" in alarm


def test_prompts_that_fill_the_limit_are_told_as_such() -> None:
    (alarm,) = check_steps({"stops/length_rollout": 1.0, "stops/done": 0.0, "rollout/turns": 0.0})
    assert "before the policy writes anything" in alarm and "forgotten" not in alarm
    assert "raise `limits.rollout_tokens` above the length of the prompts" in alarm


def test_random_weights_are_recognised_and_nothing_else_is_blamed() -> None:
    noise = {"rollout/logprob": -6.8, "groups/teaching": 0.0, "success/sampled": 0.0, "stops/length_turn": 1.0}
    (alarm,) = check_steps(noise)
    assert alarm.startswith("every token is about equally likely") and "is this the trained checkpoint?" in alarm
    assert check_steps({"rollout/logprob": -3.0}) == [] and check_steps({"rollout/logprob": -6.8}, vocabulary=0) == []


def test_rollouts_lost_to_a_tool_are_told_by_its_name() -> None:
    lost = {"rollout/lost": 10.0, "rollout/lost_to/search": 8.0, "rollout/lost_to/sum": 2.0}
    (alarm,) = check_steps(lost)
    assert alarm.startswith("8 of 138 rollouts were lost because calls of `search` failed")
    assert "learn to avoid it" in alarm and "timeout_s" in alarm
    assert check_steps({"rollout/lost": 1.0, "rollout/lost_to/search": 1.0}) == []


def test_healthy_run_raises_no_alarm() -> None:
    climbing = [
        {"reward/mean": step / 50, "success/sampled": step / 50, "entropy": 1 - step / 60} for step in range(50)
    ]
    evaluated = [
        step | ({"eval/greedy": step["success/sampled"]} if place % 5 == 0 else {})
        for place, step in enumerate(climbing)
    ]
    assert check_steps(*evaluated) == []


def test_rising_truncation_raises_an_alarm_early() -> None:
    rising = [{"rollout/truncated": 0.02 * step} for step in range(12)]
    (alarm,) = check_steps(*rising)
    assert alarm.startswith("more and more rollouts are truncated") and "`limits.rollout_tokens`" in alarm
    assert check_steps(*[{"rollout/truncated": 0.3}] * 12) == []


def test_failing_tools_raise_an_alarm_with_the_commonest_outcome() -> None:
    calls = {"engine/outcomes/ok": 50.0, "engine/outcomes/timeout": 40.0, "engine/outcomes/error": 5.0}
    (alarm,) = check_steps(calls)
    assert alarm.startswith("47% of the calls fail; 40 of 95 calls end as `timeout`")
    assert check_steps(calls | {"engine/outcomes/ok": 500.0}) == []
    assert check_steps({"engine/outcomes/error": 5.0}) == [], "so few say nothing"
    assert check_steps({"engine/outcomes/invalid": 95.0}) == [], "what the policy gets wrong is no tool's failure"


def test_failing_tool_is_named_even_if_the_others_work() -> None:
    calls = {"engine/outcomes/ok": 80.0, "engine/outcomes/unavailable": 20.0, "engine/tools/look up/p50_s": 0.1}
    tools = {"engine/tools/look up/ok": 80.0, "engine/tools/a/b/unavailable": 20.0, "engine/tools/rare/error": 3.0}
    (alarm,) = check_steps(calls | tools)
    assert alarm.startswith("100% of the calls of `a/b` fail; 20 of 20 calls end as `unavailable`")
    assert check_steps(calls) == check_steps(calls | tools | {"engine/tools/a/b/ok": 80.0}) == []


def test_groups_dropped_as_too_stale_in_every_step_raise_an_alarm() -> None:
    dropping = {"staleness/dropped": 3.0, "staleness/max": 1.0, "groups/count": 9.0}
    (alarm,) = check_steps(*[dropping] * 5)
    assert (
        alarm.startswith("25% of the groups of the last 5 steps were dropped as too stale")
        and "`max_staleness`" in alarm
    )
    assert check_steps(*[dropping] * 4, dropping | {"staleness/dropped": 0.0}, *[dropping] * 4) == []


def test_large_kl_from_staleness_differs_from_a_too_large_step() -> None:
    (far,), (large,) = (
        check_steps({"kl/old": 0.2, "staleness/max": 2.0}),
        check_steps({"kl/old": 0.2, "staleness/max": 0.0}),
    )
    assert "lower `max_staleness`" in far and "max_staleness" not in large


def test_solved_run_without_entropy_raises_no_alarm() -> None:
    assert check_steps({"entropy": 0.8}, {"entropy": 0.001, "success/sampled": 0.99, "groups/teaching": 1.0}) == []


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


@pytest.mark.parametrize(("stop", "setting"), LIMIT_SETTINGS.items())
def test_truncation_alarm_names_the_limit(stop: StopReason, setting: str) -> None:
    other = next(one for one in LIMIT_SETTINGS if one is not stop)
    (alarm,) = check_steps({f"stops/{stop}": 0.8, f"stops/{other}": 0.15, "stops/done": 0.05})
    assert alarm.startswith(f"95% of the rollouts are truncated, 80% by {stop}\n")
    assert f"raise `{setting}`" in alarm


def test_single_turn_rollouts_raise_no_truncation_alarm() -> None:
    assert check_steps({"stops/assistant_turns": 1.0, "stops/done": 0.0, "rollout/turns": 1.0}) == []


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


def test_rising_greedy_success_raises_no_alarm() -> None:
    assert check_steps(*evaluated_steps([0.3] * 40, greedy=0.02)) == []
    assert check_steps(*evaluated_steps([0.3] * 40, greedy=0.2)) == []


def test_noisy_reward_raises_no_alarm() -> None:
    steps = [
        step | {"reward/mean": 0.5 + (place * 7919 % 13 - 6) / 20}
        for place, step in enumerate(evaluated_steps([0.3] * 40))
    ]
    assert check_steps(*steps) == []


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


def test_many_lost_rollouts_raise_an_alarm_with_the_commonest_reason() -> None:
    reasons = {"tool_failed: search: no answer within 5 s.": 30, "wall_time: not over within 600 s": 2}
    (alarm,) = check_steps({"rollout/count": 96.0, "rollout/lost": 32.0}, reasons=reasons)
    assert alarm.splitlines()[0] == (
        "32 of 128 rollouts were lost to infrastructure, 30 of them because of:"
        " tool_failed: search: no answer within 5 s"
    )
    assert check_steps({"rollout/count": 126.0, "rollout/lost": 2.0}) == []
    assert check_steps({"rollout/count": 0.0, "rollout/lost": 8.0})[0].startswith("8 of 8 rollouts were lost")


def test_alarm_is_raised_once_until_the_run_was_healthy_for_a_while() -> None:
    bad, well = {"groups/teaching": 0.0}, {}
    assert len(check_steps(bad, bad, bad)) == 1
    assert len(check_steps(bad, *[well] * (QUIET_STEPS - 1), bad)) == 1
    assert len(check_steps(bad, *[well] * QUIET_STEPS, bad)) == 2


def test_alarms_do_not_silence_each_other() -> None:
    assert len(check_steps({"groups/teaching": 0.0}, {"groups/teaching": 0.0, "kl/old": 1.0})) == 2


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


def test_every_alarm_has_observation_likely_cause_and_remedy() -> None:
    for text in every_alarm():
        assert re.fullmatch(r"\S.*\n  likely: \S.*\n  remedy: \S.*", text)
